"""Which file a model's name means. The one place that knows: other kinds of names are added here."""

from __future__ import annotations

import os
from pathlib import Path

from moestream import config
from moestream.config import Merged
from moestream.errors import MoestreamError
from moestream.models import store


def locate(merged: Merged) -> Path:
    """The file or directory of the model that is asked for.

    A name of the configuration files was resolved by :func:`moestream.config.merge`; ``./NAME`` is a file of the same name.

    Raises:
        MoestreamError: no model is given, or it is one of a hub that is not pulled, or not all of it.
    """
    text = merged["model"]
    known = f"the models of moestream.yaml: {', '.join(merged.names)}" if merged.names else ""
    if text is None:
        hint = "; or ".join(filter(None, ["moestream start --model FILE", known]))
        raise MoestreamError("no model is given", hint=hint, exit_code=2)
    path = Path(text)
    if merged.name is None and path.name == text and not text.endswith(".gguf") and not os.path.lexists(path):
        none = "no moestream.yaml names a model (moestream config path); pulled ones have names with a / (moestream list)"
        raise MoestreamError(f"--model {text}: neither a file nor a name that is known", hint=known or none)
    return store.locate(path)


def find(text: str) -> Path:
    """The file or directory of a model, by whatever ``start`` would take: a name of moestream.yaml, a pulled model, a path.

    Raises:
        MoestreamError: see :func:`locate`; or the configuration is wrong.
    """
    return locate(config.merge({"model": text}, os.environ, config.load()))
