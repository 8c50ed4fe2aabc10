"""Is a port free, and who has it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from moestream.errors import MoestreamError
from moestream.server import address


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        yield mine.getsockname()[1]


def test_taken(taken: int) -> None:
    error = address.bind_error("127.0.0.1", taken)
    assert error is not None and error.errno == errno.EADDRINUSE
    assert address.port_owner(taken) is not None
    assert address.port_owner(taken).pid == os.getpid()  # type: ignore[union-attr]
    assert address.listens(os.getpid(), taken) is True
    with pytest.raises(MoestreamError, match=rf"port {taken} on 127\.0\.0\.1 is in use by pid {os.getpid()} ") as caught:
        address.check_free("127.0.0.1", taken)
    assert caught.value.hint is not None
    assert address.bind_error("127.0.0.1", int(caught.value.hint.rsplit(" ", 1)[1])) is None


def test_taken_on_the_wildcard_too(taken: int) -> None:
    assert address.bind_error("0.0.0.0", taken) is not None


def test_free() -> None:
    port = address.free_port("127.0.0.1")
    address.check_free("127.0.0.1", port)
    assert address.port_owner(port) is None
    assert address.listens(os.getpid(), port) is False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert address.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "", "no such host"])
def test_not_loopback(host: str) -> None:
    assert not address.is_loopback(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "server.sock"])
def test_hosts_that_are_not_ours(host: str) -> None:
    with pytest.raises(MoestreamError, match=f"--host {host}"):
        address.check_free(host, 8080)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_impossible_ports(port: int) -> None:
    with pytest.raises(MoestreamError, match="expected 1 to 65535"):
        address.check_free("127.0.0.1", port)
