"""Put the table of doctor's checks and remedies into docs/doctor.md, so that it cannot differ from the code.

    python docs/doctor_checks.py            rewrite
    python docs/doctor_checks.py --check    exit 1 when it would change

The table stands between ``<!-- checks -->`` and ``<!-- /checks -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moestream.doctor.survey import CHECKS

PAGE = Path(__file__).resolve().with_name("doctor.md")
BLOCK = re.compile(r"(<!-- checks -->\n).*?(<!-- /checks -->)", re.DOTALL)


def _hint(hint: str) -> str:
    if hint == "{hint}":
        return "as the hint says, which depends on what is wrong"
    return re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), hint)


def table() -> str:
    rows = ["| check | looks at | case | when | then |", "| --- | --- | --- | --- | --- |"]
    for check in CHECKS:
        name, what = f"`{check.name}`", check.what
        for case, remedy in check.remedies.items():
            cells = (name, what, f"`{case}`", remedy.when, _hint(remedy.hint))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            name = what = ""
    return "\n".join(rows) + "\n"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda m: m[1] + table() + m[2], text)
    if table() not in new:
        raise SystemExit(f"{PAGE.name} has no place for the table: <!-- checks --> and <!-- /checks -->")
    if new == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"out of date: {PAGE.name}")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"rewritten: {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
