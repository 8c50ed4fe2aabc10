"""A pytest plugin for upstream's own server tests: models of this checkout in place of the hub's, and outcomes as JSON.

Loaded with ``-p local_models`` in the folder of upstream's tests. Nothing of upstream is edited: its classes are changed in memory.

UPSTREAM_MODEL      the model for every server that would take one from the hub
UPSTREAM_SHARDS     the first shard of the same model, for the test of split ones
UPSTREAM_OUTCOMES   where the result goes: {"collected": [test, ...], "outcomes": {test: {"outcome": "passed" | "failed" | "skipped",
                    "where": file and line of a failure}}}
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

collected: list[str] = []
outcomes: dict[str, dict[str, str]] = {}


def _stand_in(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


class _Lock:
    def __init__(self, path: str) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _not_here(*_: object, **__: object) -> None:
    raise RuntimeError("not part of this run: tests/upstream/README.md")


# What upstream's files import at the top and what is run here never needs: nothing is downloaded, and there is one process.
_stand_in("wget", download=_not_here)
_stand_in("filelock", FileLock=_Lock)
_stand_in("openai", OpenAI=_not_here)


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, os.getcwd())  # as pytest does for upstream's conftest.py
    import utils

    model, shards = os.environ["UPSTREAM_MODEL"], os.environ["UPSTREAM_SHARDS"]
    start = utils.ServerProcess.start

    def start_with_local_model(self: Any, *arguments: Any, **more: Any) -> None:
        assert self.model_url is None
        if self.model_hf_repo:
            self.model_file = shards if "-of-" in (self.model_hf_file or "") else model
            self.model_hf_repo = self.model_hf_file = None
        self.offline = True
        if self.server_embeddings and self.pooling is None:
            self.pooling = "last"  # models made for embeddings say so themselves
        start(self, *arguments, **more)

    utils.ServerProcess.start = start_with_local_model
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = lambda url, output_file_path=None: model


def pytest_itemcollected(item: pytest.Item) -> None:
    collected.append(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    before = outcomes.get(item.nodeid)
    if report.when == "call" or (report.outcome != "passed" and before is None) or (report.failed and before):
        crash = getattr(report.longrepr, "reprcrash", None)
        where = f"{Path(crash.path).name}:{crash.lineno}" if report.failed and crash else ""
        outcomes[item.nodeid] = {"outcome": report.outcome, "where": where}
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps({"collected": collected, "outcomes": outcomes}, indent=1))
