"""For every tier."""

from __future__ import annotations

import signal

# A shell makes what it starts in the background ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
