"""What ``moestream bench`` makes of its arguments."""

from __future__ import annotations

import pytest

from moestream.commands.bench import slot_counts, without_streaming
from moestream.errors import MoestreamError


def test_slots() -> None:
    assert slot_counts("32, 8,auto,32") == ["32", "8", "auto"]
    for text in ("", "8,", "8,x", "-1"):
        with pytest.raises(MoestreamError, match="expected a number of expert slots"):
            slot_counts(text)
    with pytest.raises(MoestreamError, match="off is what stock") as caught:
        slot_counts("8,off")
    assert "--vs stock" in caught.value.hint


def test_stock_gets_no_arguments_of_the_engine() -> None:
    given = ("-t", "2", "--moe-ram", "1G", "--no-repack", "--moe_prefetch", "off", "-fa", "on")
    assert without_streaming(given) == ("-t", "2", "--no-repack", "-fa", "on")
