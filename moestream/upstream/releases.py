"""Where releases of prebuilt engines are.

A release is a folder, behind an address or on disk, with a manifest (:mod:`moestream.upstream.manifest`) and its archives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from moestream import __version__, paths
from moestream.errors import MoestreamError

# Where releases are: the manifest of one is at RELEASES_URL/TAG/moestream-engines.json. Empty: nothing is published yet.
RELEASES_URL = ""
RELEASES_VARIABLE = "MOESTREAM_BINS_URL"

# Beside the archives of a release.
MANIFEST_NAME = "moestream-engines.json"

BUILD_INSTEAD = "moestream build makes an engine here"


@dataclass(frozen=True)
class Origin:
    """Where a release is: behind an address (without a trailing slash), or in a folder; the other one is None."""

    url: str | None
    folder: Path | None

    def __str__(self) -> str:
        return self.url or str(self.folder)


def releases_url(environment: Mapping[str, str]) -> str:
    """The address below which releases are; "" when there is none."""
    return (environment.get(RELEASES_VARIABLE) or RELEASES_URL).rstrip("/")


def resolve_origin(release: str | None, given: str | None, environment: Mapping[str, str]) -> Origin:
    """Where the release is that is asked for.

    Args:
        release: a tag; None for that of this version of moestream.
        given: an address or a folder that holds the manifest; instead of ``release``.

    Raises:
        MoestreamError: both are given, a folder does not exist, the tag is none, no address is known.
    """
    if given is not None:
        if release is not None:
            raise MoestreamError("--release and --from exclude each other", hint="--from names the release itself")
        if "://" in given:
            return Origin(_checked_url(given, "--from"), None)
        folder = paths.absolute(Path(given).expanduser())
        if not given or not folder.is_dir():
            raise MoestreamError(
                f"--from {given}: no such folder",
                hint=f"name a folder with {MANIFEST_NAME} and its archives, or an address that begins with https://",
            )
        return Origin(None, folder)
    tag = f"v{__version__}" if release is None else release
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", tag):
        raise MoestreamError(f"--release {tag!r} is no tag of a release", hint=f"for example: --release v{__version__}")
    base = releases_url(environment)
    if not base:
        raise MoestreamError(
            "no address of prebuilt engines is known: none have been published yet",
            hint=f"{BUILD_INSTEAD}; or name a release: --from URL|DIR, or {RELEASES_VARIABLE}=URL",
        )
    return Origin(f"{_checked_url(base, RELEASES_VARIABLE)}/{tag}", None)


def _checked_url(url: str, given_as: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise MoestreamError(f"{given_as} {url}: {error}", hint="give an address that begins with https://") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise MoestreamError(f"{given_as} {url} is no address of a web server", hint="give one that begins with https://")
    return url.rstrip("/")
