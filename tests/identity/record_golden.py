"""Record the golden node lists of test_graph.py from an unpatched llama.cpp of the pinned version.

    python tests/identity/record_golden.py

Unpacks the pin into a temporary folder, compiles its library and moe-graph.cpp against it (some minutes), and runs that on
the tests' fixtures, which the engine in use makes (``moestream build --test-series``). Needed after a bump of the pin, and when the
fixtures change; a list that changes with a patch of ours is what the test is there to find.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from fixture_models import make_layout  # noqa: E402

from moestream import paths  # noqa: E402
from moestream.upstream.fetch import fetch_pinned, resolve_source, unpack  # noqa: E402
from moestream.upstream.pin import load_pin  # noqa: E402

LAYOUTS = ("deepseek2", "gemma4", "openai-moe", "qwen2moe", "qwen3moe")


def main() -> None:
    pin = load_pin()
    fetch_pinned(pin, paths.downloads_dir())
    with tempfile.TemporaryDirectory(dir=HERE.parents[1] / "build") as scratch:
        source, build = Path(scratch, "llama.cpp"), Path(scratch, "build")
        unpack(resolve_source(None, pin, paths.downloads_dir()), source)
        options = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP", "UI")]
        subprocess.run(["cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *options], check=True)
        subprocess.run(["cmake", "--build", build, "--target", "llama", "-j", str(os.cpu_count())], check=True)
        program = Path(scratch, "moe-graph")
        subprocess.run(
            ["c++", "-std=c++17", f"-I{source}/include", f"-I{source}/ggml/include", HERE / "moe-graph.cpp", "-o", program,
             f"-L{build}/bin", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{build}/bin"],
            check=True,
        )  # fmt: skip
        for layout in LAYOUTS:
            listing = subprocess.run(
                [program, "-m", make_layout(layout, Path(scratch))], check=True, capture_output=True, text=True
            ).stdout
            (HERE / "golden" / f"{layout}.txt").write_text(listing)


if __name__ == "__main__":
    main()
