"""What ``moestream start`` refuses before it starts anything, and what it asks for by default."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moestream import gguf_facts, paths
from moestream.commands import start
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.server import address
from moestream.server.arguments import ServerSettings
from moestream.server.process import Cause, Exit
from moestream.server.supervise import ServerPlan, end_error

DEMO = paths.demo_model()


@pytest.fixture(scope="module")
def facts() -> GgufFacts:
    return gguf_facts.read(DEMO)


@pytest.mark.parametrize("slots", ["6", "64", "auto", "all", "off"])
def test_slots_that_do(facts: GgufFacts, slots: str) -> None:
    start.check_model(facts, slots)


@pytest.mark.parametrize(("slots", "hint"), [("5", "--slots 6"), ("65", "--slots all")])
def test_slots_that_do_not(facts: GgufFacts, slots: str, hint: str) -> None:
    with pytest.raises(MoestreamError, match=f"--slots {slots}: too") as caught:
        start.check_model(facts, slots)
    assert caught.value.hint is not None and hint in caught.value.hint


def test_a_model_without_experts(facts: GgufFacts) -> None:
    dense = replace(facts, expert_tensors=(), n_expert=0, n_expert_used=0, architecture="llama")
    with pytest.raises(MoestreamError, match=r"\(llama\) is not a mixture-of-experts model") as caught:
        start.check_model(dense, "auto")
    assert caught.value.hint is not None and "--slots off" in caught.value.hint
    start.check_model(dense, "off")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    fake = SimpleNamespace(id="e", backend="cpu", tool=lambda name: tmp_path / name)
    monkeypatch.setattr(start.engines, "in_use", lambda backend: fake)


def plan_of(**settings: object) -> ServerPlan:
    return start.make_plan(ServerSettings(model=DEMO, port=address.free_port("127.0.0.1"), **settings))  # type: ignore[arg-type]


def ctx_of(plan: ServerPlan) -> str:
    return plan.argv[plan.argv.index("-c") + 1]


def test_context_is_bounded(engine: None, facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctx_of(plan_of()) == str(facts.n_ctx_train) == "2048"
    assert ctx_of(plan_of(ctx=0)) == "0"
    assert ctx_of(plan_of(ctx=100)) == "100"
    monkeypatch.setattr(start.gguf_facts, "read", lambda path: replace(facts, n_ctx_train=262144))
    assert ctx_of(plan_of()) == "8192"


def test_where_to_ask(engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\n\nk1\nk2\n")
    plan = plan_of(
        host="0.0.0.0",
        extra=("--api-prefix", "/x", "--ssl-key-file", "k", "--ssl-cert-file", "c", "--api-key-file", str(keys)),
    )
    assert plan.url == f"https://127.0.0.1:{plan.port}/x"
    assert plan.api_key == "k1"
    assert plan_of(extra=("--api-key", "a,b")).api_key == "a"
    monkeypatch.setenv("LLAMA_API_KEY", "env")
    assert plan_of().api_key == "env"
    assert plan_of(extra=("--api-key", "a,b")).api_key == "a"


def test_where_to_ask_by_the_environment(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-server reads it too, and a question to another address would find nobody until the time is over."""
    monkeypatch.setenv("LLAMA_ARG_API_PREFIX", "/env")
    monkeypatch.setenv("LLAMA_ARG_SSL_KEY_FILE", "k")
    plan = plan_of()
    assert plan.url == f"http://127.0.0.1:{plan.port}/env"  # TLS takes both files
    plan = plan_of(extra=("--ssl-cert-file", "c"))
    assert plan.url == f"https://127.0.0.1:{plan.port}/env"
    monkeypatch.setenv("LLAMA_ARG_SSL_CERT_FILE", "c")
    plan = plan_of(extra=("--api-prefix", "/x"))
    assert plan.url == f"https://127.0.0.1:{plan.port}/x"
    plan = plan_of(extra=("--api-prefix", "", "--ssl-key-file", ""))
    assert plan.url == f"http://127.0.0.1:{plan.port}"
    monkeypatch.setenv("LLAMA_ARG_HOST", "192.0.2.1")  # start passes both, and arguments win
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    plan = plan_of(host="127.0.0.1", extra=("--ssl-key-file", ""))
    assert plan.url == f"http://127.0.0.1:{plan.port}/env"


def test_plan_survives_its_way_to_the_supervisor(engine: None) -> None:
    plan = plan_of(extra=("--alias", "ä"))
    assert ServerPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("error: invalid argument: --moe-slots", "built without moestream's patches", "moestream build"),
        (
            "error: invalid argument: --moe-pool",
            "cannot honour --pool: its llama-server does not know --moe-pool",
            "leave out --pool",
        ),
        ("error: invalid argument: --moe-staging", "does not know --moe-staging", "leave out --moe-staging"),
        ("error: invalid argument: --nonsense", "does not know the argument --nonsense", "llama-server --help"),
        ("x: unknown model architecture: 'q'", "architecture 'q'", "moestream engines"),
        ("couldn't bind HTTP server socket, hostname: h, port: 1", "listen on h port 1", "--port"),
        ("something else", "ended before it was ready, after 1.5 s: exit code 1", "the whole log"),
    ],
)
def test_what_llama_server_says_at_its_end(engine: None, line: str, what: str, hint: str) -> None:
    plan = plan_of()
    Path(plan.log_path).parent.mkdir(parents=True, exist_ok=True)
    Path(plan.log_path).write_text(f"first\n{line}\n")
    error = end_error(plan, Exit(Cause.DIED, code=1), was_ready=False, after_s=1.5)
    assert what in error.message.splitlines()[0]
    assert error.message.endswith(f"\n  first\n  {line}")
    assert error.hint is not None and hint in error.hint


def refusal(plan: ServerPlan, *lines: str) -> MoestreamError:
    Path(plan.log_path).parent.mkdir(parents=True, exist_ok=True)
    Path(plan.log_path).write_text("".join(f"{line}\n" for line in lines))
    return end_error(plan, Exit(Cause.DIED, code=1), was_ready=False, after_s=1.5)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("5 is too few; hint: --moe-slots 6 or more", "5 is too few", "--slots 6 or more"),
        ("no experts (a; b); hint: leave out --moe-slots", "no experts (a; b)", "serve without streaming: --slots off"),
        (
            "error loading model hyperparameters: --moe-io direct: x; hint: --moe-io buffered",
            "--io direct: x",
            "--io buffered",
        ),
        ("x; hint: fewer --moe-io-threads, a smaller context (-c)", "x", "fewer --io-threads, a smaller context (--ctx)"),
        (
            "--moe-slots map: the map has no slots; hint: --moe-map-pin 2",
            "--slots map: the map has no slots",
            "--router-top-k 2",
        ),
        ("--moe-staging ring and --moe-overlap off; hint: y", "--moe-staging ring and --overlap off", "y"),
        ("--moe-ram 9 has no room; hint: --moe-ram 1GiB, say", "--ram-tier 9 has no room", "--ram-tier 1GiB, say"),
    ],
)
def test_a_refusal_of_the_engine(engine: None, line: str, message: str, hint: str) -> None:
    """It is found among all that follows it, also beyond the lines of a log's end that are shown."""
    misleading = "common_fit_params: encountered an error while trying to fit params to free device memory"
    error = refusal(plan_of(), f"E llama_model_load: error loading model: {line}", misleading, *["more"] * 30)
    assert (error.message, error.hint) == (message, hint)


def test_a_model_error_of_upstream_keeps_the_log(engine: None) -> None:
    error = refusal(plan_of(), "llama_model_load: error loading model: tensor 'x' is not within the file bounds")
    assert "tensor 'x' is not within the file bounds" in error.message
    assert "the end of its log" in error.message


def test_a_refusal_long_ago_is_not_why_a_server_dies(engine: None) -> None:
    plan = plan_of()
    refusal(plan, "error loading model: x; hint: y")
    assert end_error(plan, Exit(Cause.DIED, code=1), was_ready=True, after_s=1.5).message.startswith("llama-server ended while")


def test_streaming_from_the_environment_without_streaming(engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_MOE_SLOTS", "")
    assert not any("moe" in a for a in plan_of(slots="off").argv if a.startswith("--"))
    monkeypatch.setenv("LLAMA_ARG_MOE_SLOTS", "8")
    assert plan_of(slots="auto").slots == "auto"
    with pytest.raises(MoestreamError, match="LLAMA_ARG_MOE_SLOTS=8 in the environment cannot be combined with --slots off"):
        plan_of(slots="off")


def test_warm_that_outlasts_the_time_to_be_ready(engine: None) -> None:
    def plan(warm: str | None, ready_timeout_s: float) -> ServerPlan:
        settings = ServerSettings(model=DEMO, port=address.free_port("127.0.0.1"), warm=warm)
        return start.make_plan(settings, ready_timeout_s=ready_timeout_s)

    with pytest.raises(MoestreamError, match="--warm 900 may take as long as --ready-timeout 900") as caught:
        plan("900", 900)
    assert caught.value.hint is not None and "--ready-timeout 1800" in caught.value.hint
    for warm, ready_timeout_s in ((None, 900), ("off", 1), ("0", 1), ("899", 900), ("3600", 0)):
        plan(warm, ready_timeout_s)


def test_a_map_at_which_one_cannot_look(tmp_path: Path) -> None:
    with pytest.raises(MoestreamError, match=r"--map .*: no such file"):
        start.check_map(tmp_path / "none")
    with pytest.raises(MoestreamError, match=r"--map .*: it is no regular file"):
        start.check_map(tmp_path)
    with pytest.raises(MoestreamError, match=r"--map .*: File name too long"):
        start.check_map(tmp_path / ("x" * 300))
