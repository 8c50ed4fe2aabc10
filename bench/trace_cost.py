"""What recording costs: two servers of one model, one with --moe-trace, are asked the same in turn; processor seconds of each.

python bench/trace_cost.py demo/moestream-demo-q4_0.gguf

Processor time and not time: what else runs on the machine changes it less. All experts are in slots, so that nothing is read and
recording is as large a part as it can be.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream.errors import MoestreamError
from moestream.server.address import free_port
from moestream.server.process import guarded
from moestream.upstream import engines

TEXT = "The command reads the file named on the command line and writes each line to standard output. "
READY_S = 600.0
# (tokens to write, copies of TEXT in the prompt)
WORK = {"decode": (900, 1), "prompt": (1, 60)}


class Server:
    """A server that is ready, and the processor time it has used."""

    def __init__(self, url: str, pid: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=READY_S, trust_env=False)
        self._process = psutil.Process(pid)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health").status_code == 200:
                    return
            if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
                raise MoestreamError("llama-server did not become ready", hint="does it serve the model with --moe-slots all?")
            time.sleep(0.1)

    def cpu_seconds(self, n_predict: int, prompt: str, times: int) -> float:
        """Processor seconds that as many answers take."""
        before = self._process.cpu_times()
        for _ in range(times):
            body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
            self._http.post("/completion", json=body).raise_for_status()
        after = self._process.cpu_times()
        return after.user + after.system - before.user - before.system


@contextlib.contextmanager
def server(model: Path, log: Path, *more: str) -> Iterator[Server]:
    port = free_port("127.0.0.1")
    command = [
        str(engines.in_use(None).tool("llama-server")), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--no-ui",
        "-c", "2048", "-t", "1", "-np", "1", "--cache-ram", "0", "--moe-slots", "all", "--moe-warm", "60", *more,
    ]  # fmt: skip
    with log.open("wb") as out, guarded(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process:
        made = Server(f"http://127.0.0.1:{port}", process.pid)
        made.wait_ready()
        yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=16, help="pairs of each kind (16)")
    parser.add_argument("--times", type=int, default=4, help="answers in each half of a pair (4)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.model, Path(folder, "plain.log")) as plain,
        server(options.model, Path(folder, "traced.log"), "--moe-trace", str(Path(folder, "trace"))) as traced,
    ):
        for kind, (n_predict, copies) in WORK.items():
            ratios, seconds = [], []
            for i in range(-1, options.rounds):  # the first is not counted
                pair = {}
                for one in (plain, traced) if i % 2 else (traced, plain):
                    pair[one] = one.cpu_seconds(n_predict, TEXT * copies, options.times)
                if i >= 0:
                    ratios.append(pair[traced] / pair[plain])
                    seconds.append(pair[plain])
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{kind}: {statistics.median(seconds):.2f} s of processor time without, times {middle:.3f} with ({low:.3f} to {high:.3f})"
            )


if __name__ == "__main__":
    try:
        main()
    except MoestreamError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
