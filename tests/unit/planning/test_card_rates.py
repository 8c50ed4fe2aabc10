"""The speeds of copies to a card and within it, asked of a driver that was made for the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moestream.planning import card_rates
from moestream.planning.card_rates import CardRates

DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
static int fails(int number) { const char * s = getenv("FAKE_CUDA_FAILS"); return s && atoi(s) == number ? 2 : 0; }
static int retained, hosts, cards;
int fake_left(void) { return retained + hosts + cards; }
int cuInit(unsigned flags) { if (fails(100)) sleep(60); if (fails(101)) abort(); return fails(1); }
int cuDeviceGet(int * device, int ordinal) { *device = 7; return fails(2); }
int cuDevicePrimaryCtxRetain(void ** ctx, int device) { if (fails(3) || device != 7) return 3; retained++; *ctx = &retained; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return 0; }
int cuCtxSetCurrent(void * ctx) { return ctx == &retained ? fails(4) : 201; }
int cuMemAllocHost_v2(void ** p, size_t n) { if (fails(5)) return 2; hosts++; *p = malloc(n); return *p ? 0 : 2; }
int cuMemFreeHost(void * p) { hosts--; free(p); return 0; }
int cuMemAlloc_v2(uint64_t * p, size_t n) { if (fails(6)) return 2; cards++; *p = 0x700000000000u; return 0; }
int cuMemFree_v2(uint64_t p) { cards -= p == 0x700000000000u; return 0; }
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t n) { if (fails(8) || to != from || to != 0x700000000000u) return 1; return 0; }
int cuMemGetInfo_v2(size_t * free, size_t * total) { *free = 7u << 20; *total = 8u << 20; return fails(10); }
int cuCtxSynchronize(void) { usleep(40000); return fails(9); }
int cuMemcpyHtoD_v2(uint64_t to, void * from, size_t n) { if (fails(7) || to != 0x700000000000u || !from) return 1; usleep(20000); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so", folder / "driver.c"], check=True)
    (folder / "libcuda.so.1").symlink_to("libcuda.so")
    return str(folder / "libcuda.so")


def left(driver: str) -> int:
    import ctypes

    return int(ctypes.CDLL(driver).fake_left())


def test_the_best_of_several(driver: str) -> None:
    rates = card_rates.measure(0.05, driver)
    assert rates.link_bytes_s is not None and 0 < rates.link_bytes_s <= card_rates._LINK_BYTES / 0.02
    assert rates.memory_bytes_s is not None and 0 < rates.memory_bytes_s <= 8 * card_rates._MEMORY_BYTES / 0.04
    assert rates.free_bytes == 7 << 20
    assert left(driver) == 0


@pytest.mark.parametrize("number", range(1, 11))
def test_whatever_fails_is_no_answer_and_leaves_nothing(driver: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAILS", str(number))
    rates = card_rates.measure(0.05, driver)
    assert (rates.link_bytes_s is None) == (number < 8)
    assert (rates.memory_bytes_s is None) == (number in (1, 2, 3, 4, 6, 8, 9))
    assert (rates.free_bytes is None) == (number in (1, 2, 3, 4, 10))
    assert left(driver) == 0


def test_no_driver_and_another_library(tmp_path: Path) -> None:
    assert card_rates.measure(library=str(tmp_path / "libcuda.so.1")) == CardRates()
    assert card_rates.measure(library="libc.so.6") == CardRates()


def test_in_a_process_of_its_own(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs or crashes is no answer, and takes nothing with it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(driver).parent))
    rates = card_rates.measure_apart()
    assert rates.free_bytes == 7 << 20 and rates.link_bytes_s is not None and rates.memory_bytes_s is not None
    monkeypatch.setenv("FAKE_CUDA_FAILS", "101")
    assert card_rates.measure_apart() == CardRates()
    monkeypatch.setenv("FAKE_CUDA_FAILS", "100")
    assert card_rates.measure_apart(timeout_s=1.5) == CardRates()
