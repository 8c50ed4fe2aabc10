"""moestream: run mixture-of-experts models that do not fit in memory.

``moestream.Llama`` is llama-cpp-python's ``Llama`` with streaming, docs/python.md; what it needs is loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestream.python_api import Llama as Llama

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from moestream.python_api import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
