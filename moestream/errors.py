"""The one exception type for failures that a user can act on."""

from __future__ import annotations


class MoestreamError(Exception):
    """An expected failure: what failed, with the offending value, and what to do about it.

    It is caught once, in ``moestream.cli``, and printed as ``error: …`` and ``hint: …`` on stderr.
    Anything else that escapes is a bug and shows its traceback.

    Args:
        message: one sentence that names what failed and the value.
        hint: the next step, preferably a command to run; None when there is none.
        exit_code: the process exit code, 1 unless documented otherwise.
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
