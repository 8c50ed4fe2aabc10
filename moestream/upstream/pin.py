"""The pin: which release of which package upstream is taken from."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from moestream import paths
from moestream.errors import MoestreamError


@dataclass(frozen=True)
class Pin:
    """What upstream is.

    Attributes:
        package: the Python package whose source distribution carries llama.cpp.
        version: its exact version.
        sha256: of the source distribution, 64 lower-case hexadecimal digits.
        directory: the folder of llama.cpp inside it, with ``/``.
        llama_cpp_commit: the llama.cpp commit that folder was taken from; shown by ``llama-server --version``.
    """

    package: str
    version: str
    sha256: str
    directory: str
    llama_cpp_commit: str


_FORM = {
    "package": r"[a-z0-9][a-z0-9-]*",
    "version": r"[0-9]+(\.[0-9]+)*",
    "sha256": r"[0-9a-f]{64}",
    "directory": r"[\w.-]+(/[\w.-]+)*",
    "llama_cpp_commit": r"[0-9a-f]{7,40}",
}


def load_pin(file: Path | None = None) -> Pin:
    """Read ``vendor/pin.toml``.

    Raises:
        MoestreamError: the file is missing, is not TOML, or a field is missing or malformed.
    """
    file = file or paths.pin_file()
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MoestreamError(f"cannot read the pin {file}: {error}", hint="reinstall moestream") from error
    names = [field.name for field in fields(Pin)]
    for name in names:
        value = values.get(name)
        if not isinstance(value, str) or not re.fullmatch(_FORM[name], value) or ".." in value:
            raise MoestreamError(f"{file}: {name} is {value!r}", hint=f"it must be a string of the form {_FORM[name]}")
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise MoestreamError(f"{file}: unknown field {unknown[0]!r}", hint=f"the fields are: {', '.join(names)}")
    return Pin(**values)
