"""Which cards an engine is compiled for, with a stand-in for nvidia-smi."""

from __future__ import annotations

import pytest

from moestream.errors import MoestreamError
from moestream.upstream import cuda


@pytest.fixture
def smi(tmp_path, monkeypatch, write_program):
    """``smi(script)``: only this nvidia-smi is on PATH; it writes down what it was asked."""

    def use(script: str) -> None:
        write_program("nvidia-smi", f'echo "$*" > {tmp_path}/asked\n{script}')

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return use


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("9.0", ("90-real",)),
        ("8.6\n8.6\n7.5", ("75-real", "86-real")),
        ("12.0\n8.9", ("89-real", "120-real")),
    ],
)
def test_the_cards_in_the_machine(smi, tmp_path, said, expected):
    smi("".join(f"echo {line}\n" for line in said.split()))
    assert cuda.architectures([]) == expected
    assert (tmp_path / "asked").read_text() == "--query-gpu=compute_cap --format=csv,noheader,nounits\n"


def test_what_is_named_is_taken_and_no_card_is_asked(smi):
    assert cuda.architectures(["86,90"]) == ("86", "90")
    assert cuda.architectures(["75-virtual, 90a-real", "90a-real"]) == ("75-virtual", "90a-real")


@pytest.mark.parametrize("wanted", ["8.6", "sm_90", "native", "90,", "", "90-fast"])
def test_no_architecture(wanted):
    with pytest.raises(MoestreamError, match="is no CUDA architecture") as caught:
        cuda.architectures([wanted])
    assert repr(wanted.split(",")[-1]) in caught.value.message and "--cuda-archs 86,90" in caught.value.hint


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no NVIDIA card can be seen: nvidia-smi is not installed"),
        ("echo No devices were found\n", "no NVIDIA card can be seen: nvidia-smi: No devices were found"),
        ("echo 9.0; echo lost the driver >&2; exit 9\n", "nvidia-smi: lost the driver"),
        ("echo '[N/A]'\n", r"nvidia-smi: \[N/A\]"),
    ],
)
def test_no_card(smi, script, message):
    if script:
        smi(script)
    with pytest.raises(MoestreamError, match=message) as caught:
        cuda.architectures([])
    assert "--cuda-archs" in caught.value.hint


def test_an_nvidia_smi_that_hangs(smi, monkeypatch):
    smi("exec 2>&-; while :; do :; done\n")
    monkeypatch.setattr(cuda, "_TIMEOUT_S", 0.2)
    with pytest.raises(MoestreamError, match=r"nvidia-smi says nothing for 0\.2 s"):
        cuda.architectures([])
