"""bench/policies.sh names every source that its program needs. Only linked here: what it measures is no test."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_it_links(tmp_path: Path) -> None:
    script = (ROOT / "bench" / "policies.sh").read_text().replace('"$root/build/bench', f'"{tmp_path}')
    script = re.sub(r"^exec .*$", "", script, flags=re.MULTILINE).replace("-O2", "-O0")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "policies.sh").write_text(script.replace('$(dirname "$0")/..', str(ROOT)))
    done = subprocess.run(["sh", str(tmp_path / "bench" / "policies.sh")], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "policies").is_file()
