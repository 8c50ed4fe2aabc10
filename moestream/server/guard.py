"""The small program between moestream and llama-server. It sees to it that no orphan stays.

    python -I -S guard.py pdeathsig PARENT_PID -- PROGRAM ARGS…
    python -I -S guard.py pipe FD -- PROGRAM ARGS…

Run as a script by path, with the standard library alone, so that it starts in milliseconds and does not
depend on how moestream is installed.

``pdeathsig`` (Linux): asks the kernel to kill this process when its parent goes, then *becomes* the
program. The setting survives exec. A program between fork and exec instead of a preexec_fn, because code
run in a fork of a threaded process may deadlock. Two traps: the signal is tied to the thread that forked,
so ``process.py`` forks from the thread that lives until the child is reaped; and the parent may die before
prctl, so the parent's pid is compared afterwards. The signal is SIGKILL: a server that hangs would survive
SIGTERM, and one being killed has nothing to save.

``pipe`` (elsewhere): stays as the parent of the program. The parent holds the other end of pipe FD, and the
kernel closes it however the parent ends; then the program is killed. Signals are passed on and the
program's end becomes the guard's own.
"""

import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 125
EXIT_CANNOT_RUN = 126


def _cannot_run(program, error):
    print(f"cannot run {program}: {error.strerror or error}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CANNOT_RUN)


def _with_pdeathsig(parent_pid, argv):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CANNOT_RUN)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_PARENT_GONE)
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        _cannot_run(argv[0], error)


def _with_pipe(fd, argv):
    import select

    child = None
    early = []  # signals that came before there was a child

    def pass_on(number, _frame):
        early.append(number) if child is None else child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    try:
        child = subprocess.Popen(argv)  # the pipe is not passed on: close_fds
    except OSError as error:
        _cannot_run(argv[0], error)
    for number in early:
        child.send_signal(number)
    while child.poll() is None:
        readable, _, _ = select.select([fd], [], [], 0.1)
        if readable and not os.read(fd, 1):
            child.kill()
            child.wait()
            sys.exit(EXIT_PARENT_GONE)
    if child.returncode < 0:
        number = -child.returncode
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(child.returncode)


def main():
    mode, number, separator, *argv = sys.argv[1:]
    if separator != "--" or not argv:
        sys.exit(__doc__)
    if mode == "pdeathsig":
        _with_pdeathsig(int(number), argv)
    elif mode == "pipe":
        _with_pipe(int(number), argv)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
