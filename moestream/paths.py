"""Where things live: what ships with moestream, what is fetched and built, what running servers leave.

Two layouts exist. In a *checkout*, ``patches/``, ``engine/`` and ``vendor/pin.toml`` are read from the
checkout and upstream is unpacked and compiled in it (all git-ignored). In an *installed wheel* the same
folders are package data and the unpacking happens below the data folder.

``MOESTREAM_HOME`` puts everything that is written outside a checkout below one folder. Without it the XDG
base directories are used.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moestream.errors import MoestreamError

_PACKAGE = Path(__file__).resolve().parent


def import_path() -> str:
    """PYTHONPATH for a child that must import this very moestream from another folder."""
    return os.pathsep.join([str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def checkout_root() -> Path | None:
    """The root of the checkout this package runs from, or None when it is installed."""
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "patches" / "series").is_file():
        return root
    return None


def shipped_root() -> Path:
    """The folder that holds ``patches/``, ``engine/``, ``vendor/pin.toml`` and ``demo/``."""
    return checkout_root() or _PACKAGE / "_shipped"


def pin_file() -> Path:
    return shipped_root() / "vendor" / "pin.toml"


def patches_dir() -> Path:
    return shipped_root() / "patches"


def engine_source_dir() -> Path:
    return shipped_root() / "engine"


def licence_file() -> Path:
    return shipped_root() / "LICENSE"


def demo_model() -> Path:
    """The small mixture-of-experts model that ships with the project."""
    return shipped_root() / "demo" / "moestream-demo-q4_0.gguf"


def absolute(path: Path) -> Path:
    """The same path for a process in any other folder, and for a person: without ``..``. Links stay, but for those in front of a ``..``.

    Raises:
        MoestreamError: it is relative to a working directory that has been deleted.
    """
    try:
        whole = path.absolute()
        if ".." not in whole.parts:
            return whole
        last = len(whole.parts) - 1 - whole.parts[::-1].index("..")
        return Path(os.path.realpath(Path(*whole.parts[: last + 1])), *whole.parts[last + 1 :])
    except FileNotFoundError as error:
        raise MoestreamError(
            f"{path}: relative to the working directory, which has been deleted",
            hint="cd to a folder that exists, or give an absolute path",
        ) from error


def check_file(given_as: str, path: Path, *, hint: str) -> None:
    """Refuse a path that is no file, or at which nothing can be found out.

    Args:
        given_as: the flag.

    Raises:
        MoestreamError: says why.
    """
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MoestreamError(f"{given_as} {path}: no such file", hint=hint) from error
    except OSError as error:
        raise MoestreamError(f"{given_as} {path}: {error.strerror}", hint="check the path") from error
    if not is_file:
        raise MoestreamError(f"{given_as} {path}: it is no regular file", hint=hint)


def _base(xdg_variable: str, default: str, name_below_home: str) -> Path:
    """A base folder: below MOESTREAM_HOME when set, else the XDG variable, else its default.

    The XDG specification says that relative values are to be ignored.
    """
    home = os.environ.get("MOESTREAM_HOME")
    if home:
        return absolute(Path(home).expanduser()) / name_below_home
    xdg = os.environ.get(xdg_variable, "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / default
    return base / "moestream"


def data_dir() -> Path:
    """What is expensive to make again: built engines, models, and sources when installed."""
    return _base("XDG_DATA_HOME", ".local/share", "data")


def config_dir() -> Path:
    """What the user has written: moestream.yaml."""
    return _base("XDG_CONFIG_HOME", ".config", "config")


def cache_dir() -> Path:
    """What can be downloaded again."""
    return _base("XDG_CACHE_HOME", ".cache", "cache")


def state_dir() -> Path:
    """What running servers leave: their records and logs."""
    return _base("XDG_STATE_HOME", ".local/state", "state")


def engines_dir() -> Path:
    """One folder below it for each built engine, named by its id."""
    return data_dir() / "engines"


def models_dir() -> Path:
    """Models that ``moestream pull`` has downloaded, in folders OWNER/REPO."""
    return data_dir() / "models"


def maps_dir() -> Path:
    """One router map below it for each model that was served, named by its fingerprint."""
    return data_dir() / "maps"


def downloads_dir() -> Path:
    return cache_dir() / "downloads"


def workspace_dir() -> Path:
    """Where upstream is unpacked (``vendor/llama.cpp``) and compiled (``build/BACKEND``).

    The checkout itself, or a folder of the same shape in the data folder. The shape is the same so that a
    compiler cache, which sees paths relative to this folder, serves both.
    """
    return checkout_root() or data_dir() / "workspace"
