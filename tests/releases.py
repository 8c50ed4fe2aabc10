"""Releases of engines as ``moestream pack-bins`` makes them, of any content, and a server for them that can misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import os
import platform
import re
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moestream import __version__
from moestream.upstream import engines
from moestream.upstream.pin import load_pin

SERVER = "#!/bin/sh\necho version: made up\n"
# Does not compress, so that a transfer can be cut in the middle.
PADDING = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(4000))


def described(backend: str = "cpu", **changes: Any) -> engines.Engine:
    """A portable engine of this version with one program."""
    source, sources, cpu = load_pin().version, engines.sources_hash(), engines.portable_cpu()
    fields = {
        "id": engines.engine_id(source, sources, backend, cpu), "path": Path(), "source": source, "sources_sha256": sources,
        "backend": backend, "cpu": cpu, "built_at": "2026-01-02T03:04:05+00:00", "targets": ("llama-server",),
        "tools": ("llama-server",), "cmake_args": (), "extra_cmake_args": (), "web_ui": False, "test_series_sha256": "",
        "portable": True,
    }  # fmt: skip
    return engines.Engine(**{**fields, **changes})


def member(name: str, content: bytes = b"", mode: int = 0o644, **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), mode, 1_700_000_000
    for field, value in changes.items():
        setattr(info, field, value)
    return info, content


def members_of(engine: engines.Engine, server: str = SERVER) -> list[tuple[tarfile.TarInfo, bytes]]:
    """What an archive of ``engine`` holds: its description, one program, one library with a link to it."""
    fields = {name: value for name, value in asdict(engine).items() if name != "path"}
    return [
        member("bin", type=tarfile.DIRTYPE, mode=0o755),
        member("bin/libx.so", type=tarfile.SYMTYPE, linkname="libx.so.0"),
        member("bin/libx.so.0", PADDING, 0o755),
        member("bin/llama-server", server.encode(), 0o755),
        member("engine.json", json.dumps({"schema": engines.SCHEMA, **fields}).encode()),
        member("licenses", type=tarfile.DIRTYPE, mode=0o755),
        member("licenses/llama.cpp", b"MIT\n"),
    ]


def archive_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz", preset=0) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def listed(engine: engines.Engine, archive: bytes, **changes: Any) -> dict[str, Any]:
    """The manifest's entry of an engine; ``changes`` make it another one, or a lie."""
    return {
        "id": engine.id, "source": engine.source, "llama_cpp_commit": load_pin().llama_cpp_commit,
        "sources_sha256": engine.sources_sha256, "backend": engine.backend, "os": "linux", "arch": platform.machine(),
        "cpu_features": [], "cpu_variants": ["x64"], "gpu_archs": [], "min_glibc": "2.17", "min_driver": "",
        "system_libraries": [], "file": f"moestream-{engine.id}.tar.xz", "sha256": hashlib.sha256(archive).hexdigest(),
        "size_bytes": len(archive), "installed_bytes": 1 << 20, "tools": list(engine.tools), "web_ui": engine.web_ui,
        "built_at": engine.built_at, **changes,
    }  # fmt: skip


def manifest_of(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"schema": "moestream/engine-release/1", "moestream_version": __version__, "engines": list(entries), **changes}


def write_release(
    folder: Path, members: list[tuple[tarfile.TarInfo, bytes]] | None = None, *, engine: engines.Engine | None = None,
    **changes: Any,
) -> engines.Engine:  # fmt: skip
    """Write a release of one engine into ``folder``; ``changes`` are of its entry."""
    engine = engine or described()
    archive = archive_of(members_of(engine) if members is None else members)
    entry = listed(engine, archive, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / entry["file"]).write_bytes(archive)
    (folder / "moestream-engines.json").write_text(json.dumps(manifest_of(entry)))
    return engine


class ReleaseServer(http.server.ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        ranges: whether it knows the Range header.
        cuts: how many bytes of an archive each further request gets before the connection is dropped; then all.
        replies: statuses for the next requests of archives or manifest, by the end of the name; then the file.
        headers: that replace those of an archive's answer.
        redirect_to: the address of the server that everyone is sent on to.
        before_block: called before each block of an archive, with the bytes already sent.
        seen: path and Range header of each request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.ranges = True
        self.cuts: list[int] = []
        self.replies: dict[str, list[int]] = {}
        self.headers: dict[str, str] = {}
        self.redirect_to = ""
        self.before_block: Callable[[int], None] = lambda sent: None
        self.seen: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that goes away is no error
            super().handle_error(request, client_address)

    def archives_asked(self) -> list[str | None]:
        """The Range headers of the requests for archives."""
        return [span for path, span in self.seen if path.endswith(".tar.xz")]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReleaseServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        span = self.headers.get("Range")
        self.server.seen.append((self.path, span))
        if self.server.redirect_to:
            self.send_response(302)
            self.send_header("Location", self.server.redirect_to + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        for suffix, statuses in self.server.replies.items():
            if self.path.endswith(suffix) and statuses:
                self.send_response(statuses.pop(0))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        file = self.server.folder / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        is_archive = self.path.endswith(".tar.xz")
        start, status, headers = 0, 200, {}
        if span and self.server.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1])
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        body = content[start:]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers, **(self.server.headers if is_archive else {})}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        end = self.server.cuts.pop(0) if is_archive and self.server.cuts else len(body)
        for at in range(0, min(end, len(body)), 8192):
            if is_archive:
                self.server.before_block(at)
            self.wfile.write(body[at : min(at + 8192, end)])
        if end < len(body) or "Content-Length" in self.server.headers:
            self.close_connection = True


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ReleaseServer]:
    server = ReleaseServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def slowly(sent: int) -> None:
    time.sleep(0.01)


def files_below(folder: Path) -> set[str]:
    """Every file and link below a folder, and empty folders."""
    found = set()
    for base, folders, files in os.walk(folder):
        found |= {os.path.relpath(os.path.join(base, name), folder) for name in [*files, *(f for f in folders if not os.listdir(os.path.join(base, f)))]}  # fmt: skip
    return found
