"""``python -m moestream.demo``, what ``make run`` shows: serve a model with few slots and ask it one question.

The demo model is small, so its experts would fit in memory; with few slots they do not fit in *those*, and it is
served as a model many times larger would be.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer

from moestream import output, paths
from moestream.cli import print_error
from moestream.commands.start import make_plan, serve
from moestream.errors import MoestreamError
from moestream.server import address, report
from moestream.server.arguments import DEFAULT_PORT, ServerSettings, parse_slots
from moestream.server.client import Health
from moestream.server.supervise import ServerPlan, notice

QUESTION = "What does the command grep do?"
DEMO_SLOTS = "8"
MAX_TOKENS = 200
ANSWER_TIMEOUT_S = 600.0  # a large model on a slow disk


def ask(plan: ServerPlan, question: str) -> str:
    """Ask through the OpenAI endpoint, as any client would.

    Raises:
        httpx.HTTPError: no answer came, or an error.
        MoestreamError: the answer is not what the OpenAI interface says.
    """
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    response = httpx.post(
        f"{plan.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS, "temperature": 0},
        headers=headers,
        timeout=ANSWER_TIMEOUT_S,
        trust_env=False,
    )
    response.raise_for_status()
    try:
        message = response.json()["choices"][0]["message"]
        return str(message.get("content") or message.get("reasoning_content") or "").strip()
    except (ValueError, LookupError, AttributeError) as error:
        raise MoestreamError(f"the server's answer is not understood: {response.text[:200]}") from error


def demo(model: Path | None, slots: str | None, port: int, once: bool) -> None:
    """Start, ask, print, and serve until Ctrl-C (or end with ``once``).

    Raises:
        MoestreamError: as ``moestream start`` does, or the question was not answered.
    """
    host = ServerSettings.host
    taken = address.bind_error(host, port) if port else None
    if taken is not None and taken.errno == errno.EADDRINUSE:
        free = address.free_port(host, port)
        owner = address.port_owner(port)
        notice(f"port {port} is in use{f' by {owner}' if owner else ''}; using port {free}")
        port = free
    settings = ServerSettings(
        model=model or paths.demo_model(),
        slots=parse_slots(slots or ("auto" if model else DEMO_SLOTS), ("auto", "all", "off")),  # there is no router map here
        port=port,
        kept_map=False,  # the same from one time to the next
    )
    plan = make_plan(settings)
    serving = serve(plan)
    try:
        for ready in serving:
            print(ready.text, flush=True)
            print(f"\nquestion    {QUESTION}", flush=True)
            try:
                print(f"answer      {ask(plan, QUESTION)}\n", flush=True)
            except httpx.HTTPError as error:
                with plan.client() as client:
                    if client.health() is Health.REFUSED:
                        continue  # it ended: because of Ctrl-C, or the loop raises what it died of
                raise MoestreamError(
                    f"the question was not answered: {error or type(error).__name__}",
                    hint=f"the server's log: {plan.log_path}",
                ) from error
            with plan.client() as client:
                stats = client.stats()
            rows = [
                ("slots", report.slots_line(stats)),
                ("experts", report.traffic_line(stats)),
                ("memory", report.memory_line(stats)),
                ("address", f"{plan.url} (OpenAI: {plan.url}/v1)"),
            ]
            print(report.table(rows), flush=True)
            if once:
                return
            print("\nserving until Ctrl-C", flush=True)
    finally:
        serving.close()


def main(
    model: Annotated[Path | None, typer.Option(metavar="FILE|DIR", help="Default: the demo model.")] = None,
    slots: Annotated[str | None, typer.Option(metavar="N|auto|all|off", help="8 for the demo model, else auto.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Another one is used when it is taken.")] = DEFAULT_PORT,
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
) -> None:
    """Serve a model with few expert slots and ask it one question."""
    try:
        output.prepare()
        demo(model, slots, port, once)
    except MoestreamError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    typer.run(main)
