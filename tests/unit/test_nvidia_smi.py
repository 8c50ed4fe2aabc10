"""nvidia-smi by stand-ins on PATH: what it says, and the ways in which it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestream import nvidia_smi
from moestream.nvidia_smi import Answer, ask


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``smi(script)``: the only program on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def use(script: str, first: str = "#!/bin/sh") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"{first}\n{script}\n")
        program.chmod(0o755)

    return use


def test_a_row_for_each_gpu(smi, tmp_path: Path) -> None:
    smi(f'echo "$@" > {tmp_path}/asked; echo "NVIDIA A, rev 2, 8192, 7000"; echo; echo "B,[N/A], [N/A]"; echo "half, a"')
    assert ask("name", "memory.total", "memory.free") == Answer((("NVIDIA A, rev 2", "8192", "7000"), ("B", "[N/A]", "[N/A]")))
    assert (tmp_path / "asked").read_text() == "--query-gpu=name,memory.total,memory.free --format=csv,noheader,nounits\n"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", "nvidia-smi: finds no GPU"),
        ("echo 'No devices were found'", "nvidia-smi: No devices were found"),
        ("echo 'NVIDIA A, 1'; echo 'lost the driver' >&2; exit 9", "nvidia-smi: lost the driver"),
        ("echo 'Failed to initialize NVML'; echo more; exit 18", "nvidia-smi: Failed to initialize NVML"),
        ("printf '\\377\\n' >&2; exit 1", "nvidia-smi: \ufffd"),
    ],
)
def test_no_rows(smi, script: str, problem: str) -> None:
    smi(script)
    assert ask("name", "memory.total") == Answer((), problem)


def test_none_that_hangs_and_none_that_runs(smi) -> None:
    assert ask("name") == Answer((), nvidia_smi.NOT_INSTALLED)
    smi("exec 2>&-; while :; do :; done")
    assert ask("name", timeout_s=0.2).problem == "nvidia-smi says nothing for 0.2 s"
    smi("", "#!/nonexistent/interpreter")
    assert ask("name").problem.startswith("nvidia-smi: ")
