"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from moestream.errors import MoestreamError

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_size(flag: str, text: str) -> int:
    """``4GiB``, ``1.5 GiB``, ``800MB`` as bytes. The engine reads sizes likewise.

    Raises:
        MoestreamError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B|)", text.strip().upper(), re.ASCII)
    if not match or match[2] not in _UNITS or not 1 <= float(match[1]) * _UNITS[match[2]] < 9e18:
        raise MoestreamError(f"{flag} {text}: expected a size", hint=f"for example {flag} 4GiB")
    return int(float(match[1]) * _UNITS[match[2]])
