"""A hub for tests of what downloads from one: real sockets, the few addresses that huggingface_hub asks for, and fault switches.

Like the hub it keeps large files elsewhere: ``/OWNER/REPO/resolve/COMMIT/PATH`` redirects to another server, on a port (so, for an
HTTP client, on a host) of its own, which must see no token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """A repository, and what is wrong with it.

    Attributes:
        files: bytes by path.
        sha256: what the hub claims of a path, where that is not what the bytes have.
        size: the same of the size.
        access: ``gated`` or ``private``: only with the token of the hub.
        in_git: paths that are not kept in LFS.
        gone: paths that are listed, and not there.
        no_digest: the listing tells no sizes and digests, as that of a poor mirror.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    sha256: dict[str, str] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    access: str = ""
    in_git: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    no_digest: bool = False

    def listing(self, name: str) -> dict[str, Any]:
        siblings = []
        for path, data in self.files.items():
            sibling: dict[str, Any] = {"rfilename": path}
            size = self.size.get(path, len(data))
            if not self.no_digest:
                sibling |= {"size": size, "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
                if path not in self.in_git:
                    sha256 = self.sha256.get(path) or hashlib.sha256(data).hexdigest()
                    sibling["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
            siblings.append(sibling)
        return {"_id": "1", "id": name, "sha": self.commit, "private": False, "gated": False, "siblings": siblings}


@dataclass
class Request:
    server: str  # hub or storage
    path: str
    range: str | None
    authorization: str | None


class FakeHub:
    """The two servers.

    Attributes:
        repos: by OWNER/REPO.
        token: what opens gated and private repositories.
        cuts: the storage ends each of the next answers after so many bytes.
        stall_after: it sends so many bytes of an answer, and then nothing until ``released``.
        no_range: it ignores Range, as some proxies do.
        refuses: status and message with which the hub answers every question.
        html: the hub answers every question with a page, as a login page of a network does.
        requests: what was asked for.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.token = "hf_secret"
        self.cuts: list[int] = []
        self.stall_after: int | None = None
        self.released = threading.Event()
        self.no_range = False
        self.refuses: tuple[int, str] | None = None
        self.html = False
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._hub = self._serve(self._answer_hub)
        self._storage = self._serve(self._answer_storage)
        self.url = f"http://127.0.0.1:{self._hub.server_port}"
        self._storage_url = f"http://127.0.0.1:{self._storage.server_port}"

    def _serve(self, answer: Any) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def close(self) -> None:
        self.released.set()
        for server in (self._hub, self._storage):
            server.shutdown()
            server.server_close()

    def ranges(self) -> list[str | None]:
        """What was asked of the storage, in order: a Range header, or None for all."""
        return [request.range for request in self.requests if request.server == "storage"]

    def _note(self, server: str, handler: BaseHTTPRequestHandler) -> str:
        path = unquote(urlsplit(handler.path).path)
        with self._lock:
            self.requests.append(Request(server, path, handler.headers.get("Range"), handler.headers.get("Authorization")))
        return path

    # ---- the hub

    def _answer_hub(self, handler: BaseHTTPRequestHandler) -> None:
        path = self._note("hub", handler)
        if self.html:
            return _send(handler, 200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        if self.refuses:
            return _send(handler, self.refuses[0], b"", {"X-Error-Message": self.refuses[1]})
        allowed = handler.headers.get("Authorization") == f"Bearer {self.token}"
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            repo = self.repos.get(match[1])
            if repo is None or (repo.access == "private" and not allowed):
                return self._no_repo(handler)
            return _send(handler, 200, json.dumps(repo.listing(match[1])).encode(), {"Content-Type": "application/json"})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self.repos.get(match[1])
            if repo is None or (repo.access == "private" and not allowed):
                return self._no_repo(handler)
            if repo.access == "gated" and not allowed:
                code = 403 if handler.headers.get("Authorization") else 401
                said = "Access to this model is restricted. You must be authenticated to access it."
                return _send(handler, code, said.encode(), {"X-Error-Code": "GatedRepo", "X-Error-Message": said})
            if match[2] != repo.commit or match[3] not in repo.files or match[3] in repo.gone:
                return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            data = repo.files[match[3]]
            sha256 = hashlib.sha256(data).hexdigest()
            more = {"X-Repo-Commit": repo.commit, "X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
            return _send(handler, 302, b"", {**more, "Location": f"{self._storage_url}/{match[1]}/{match[3]}?Signature=abc"})
        return _send(handler, 404, b"", {})

    def _no_repo(self, handler: BaseHTTPRequestHandler) -> None:
        # the hub does not tell strangers which private repositories there are
        more = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        _send(handler, 404 if handler.headers.get("Authorization") else 401, b"", more)

    # ---- where the bytes are

    def _answer_storage(self, handler: BaseHTTPRequestHandler) -> None:
        path = self._note("storage", handler)
        owner, repo, file = path[1:].split("/", 2)
        data = self.repos[f"{owner}/{repo}"].files[file]
        start, end = 0, len(data)
        code, headers = 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
        if asked and not self.no_range:
            start, end = int(asked[1]), min(end, int(asked[2]) + 1) if asked[2] else end
            if start >= len(data):
                return _send(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
            code, headers = 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        with self._lock:
            cut = self.cuts.pop(0) if self.cuts else None
        body = data[start:end]
        handler.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return None
        if self.stall_after is not None:
            handler.wfile.write(body[: self.stall_after])
            handler.wfile.flush()
            self.released.wait()
            handler.close_connection = True
        elif cut is not None:
            handler.wfile.write(body[:cut])
            handler.close_connection = True
        else:
            handler.wfile.write(body)
        return None


def _send(handler: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(code)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    try:
        yield hub
    finally:
        hub.close()
