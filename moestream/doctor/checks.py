"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """``warn``: works, but less well than it could; ``fail``: something that is needed does not work."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    skipped = "skipped"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name.
        case: which of its remedies applies; "" when none is needed.
        found: one line.
        hint: what to do; None when nothing is to be done.
        data: the numbers behind ``found``, units last in their names.
    """

    check: str
    status: Status
    case: str
    found: str
    hint: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Remedy:
    """What can be wrong, and what to do then.

    Attributes:
        when: completes "when …".
        hint: may have ``{names}``, which the check fills in; ``{hint}`` alone is that of another message.
    """

    when: str
    hint: str


@dataclass(frozen=True)
class Check:
    """One thing that is looked at. docs/doctor.md is made of these.

    Attributes:
        name: as shown.
        what: is looked at.
        remedies: by case.
    """

    name: str
    what: str
    remedies: Mapping[str, Remedy]

    def ok(self, found: str, **data: Any) -> Finding:
        return Finding(self.name, Status.ok, "", _line(found), None, data)

    def skipped(self, why: str) -> Finding:
        return Finding(self.name, Status.skipped, "", _line(why))

    def warn(self, case: str, found: str, values: Mapping[str, object] | None = None, **data: Any) -> Finding:
        """Args: values: of the names in the remedy's hint."""
        return self._problem(Status.warn, case, found, values, data)

    def fail(self, case: str, found: str, values: Mapping[str, object] | None = None, **data: Any) -> Finding:
        """Args: values: of the names in the remedy's hint."""
        return self._problem(Status.fail, case, found, values, data)

    def problem(self, needed: bool, case: str, found: str, values: Mapping[str, object] | None = None, **data: Any) -> Finding:
        """A failure of what is needed, else a warning."""
        return self._problem(Status.fail if needed else Status.warn, case, found, values, data)

    def _problem(
        self, status: Status, case: str, found: str, values: Mapping[str, object] | None, data: Mapping[str, Any]
    ) -> Finding:
        hint = self.remedies[case].hint.format_map(values or {})
        return Finding(self.name, status, case, _line(found), _line(hint), data)


def _line(text: str) -> str:
    """Text from elsewhere as one line that a terminal may have."""
    return "".join(c if c.isprintable() else " " for c in text).strip()
