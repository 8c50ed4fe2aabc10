"""Is an address free, and who has it if not."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from moestream.errors import MoestreamError


@dataclass(frozen=True)
class PortOwner:
    """The process that listens on a port, as far as it can be known without more rights."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def _sockaddr(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise MoestreamError(f"--host {host}: not an address of this machine ({error})", hint="use --host 127.0.0.1") from error
    family, _, _, _, address = info[0]
    return family, address


def is_loopback(host: str) -> bool:
    """Whether this address, or every one of this name, can be reached from this machine alone."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return bool(host) and all(ipaddress.ip_address(a.split("%")[0]).is_loopback for a in found)
    except (OSError, UnicodeError, ValueError):
        return False


def bind_error(host: str, port: int) -> OSError | None:
    """Try to bind as llama-server will (SO_REUSEADDR, no SO_REUSEPORT); None when that works."""
    family, address = _sockaddr(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return error
    return None


def free_port(host: str, near: int | None = None) -> int:
    """A port that is free now: the next ones after ``near`` first, else one the system chooses."""
    for port in range((near or 0) + 1, min((near or 0) + 33, 65536)) if near else ():
        if bind_error(host, port) is None:
            return port
    family, address = _sockaddr(host, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def port_owner(port: int) -> PortOwner | None:
    """Who listens on this TCP port; None when nobody does or when it is another user's process."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        # macOS wants root for the whole table; our own processes can be asked one by one.
        return _port_owner_by_process(port)
    for c in connections:
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
            return _owner(c.pid)
    return None


def _port_owner_by_process(port: int) -> PortOwner | None:
    for process in psutil.process_iter():
        if listens(process.pid, port):
            return _owner(process.pid)
    return None


def _owner(pid: int) -> PortOwner | None:
    try:
        return PortOwner(pid, psutil.Process(pid).name())
    except psutil.Error:
        return None


def listens(pid: int, port: int) -> bool | None:
    """Whether this process or a child of it listens on the port; None when that cannot be known."""
    try:
        process = psutil.Process(pid)
        for p in (process, *process.children(recursive=True)):
            for c in p.net_connections(kind="tcp"):
                if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port:
                    return True
    except (psutil.Error, OSError):
        return None
    return False


def check_free(host: str, port: int) -> None:
    """Refuse an address that llama-server could not listen on.

    Raises:
        MoestreamError: the port is taken (by whom, when that can be known) or may not be used.
    """
    if host.endswith(".sock"):
        raise MoestreamError(f"--host {host}: moestream serves TCP addresses, not Unix sockets", hint="use --host 127.0.0.1")
    if not 0 < port < 65536:
        raise MoestreamError(f"--port {port}: expected 1 to 65535", hint="use --port 8080")
    error = bind_error(host, port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        by = f" by {owner}" if owner else " by another process"
        raise MoestreamError(f"port {port} on {host} is in use{by}", hint=f"use a free port: --port {free_port(host, port)}")
    if error.errno == errno.EACCES:
        raise MoestreamError(f"port {port} on {host} may not be used by this user", hint="use a port above 1023: --port 8080")
    if error.errno == errno.EADDRNOTAVAIL:
        raise MoestreamError(f"--host {host}: not an address of this machine", hint="use --host 127.0.0.1")
    raise MoestreamError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}")
