"""Clients that misbehave, and what a process uses: sockets in the hand of the test.

Knows of HTTP only what it takes to send a request and to find the end of an answer's head.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

from .harness import Daemon, until

MIB = 1024 * 1024


class Client:
    """One connection to a daemon, with a receive buffer that is small, so that not reading is felt soon."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.port = port
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.read = b""

    async def send(self, body: Any, key: str, path: str = "/v1/chat/completions", **headers: str) -> Client:
        """Connect and send a whole request; nothing is read yet."""
        data = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {key}",
            f"Content-Length: {len(data)}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        return await self.send_raw("\r\n".join([*head, "", ""]).encode() + data)

    async def send_raw(self, data: bytes) -> Client:
        """Connect and send bytes."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, ("127.0.0.1", self.port))
        await loop.sock_sendall(self.sock, data)
        return self

    async def until(self, what: bytes, timeout: float = 20.0) -> bytes:
        """Read until the bytes have come; return all that was read."""

        async def read() -> None:
            while what not in self.read:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
                assert data, f"closed before {what!r}: {self.read!r}"
                self.read += data

        await asyncio.wait_for(read(), timeout)
        return self.read

    async def rest(self, timeout: float = 20.0) -> bytes:
        """Read until the daemon closes the connection; return all that was read."""

        async def read() -> None:
            while data := await asyncio.get_running_loop().sock_recv(self.sock, 65536):
                self.read += data

        await asyncio.wait_for(read(), timeout)
        return self.read

    def request_id(self) -> str:
        """The id of the request, of a head that has been read."""
        head = self.read.partition(b"\r\n\r\n")[0].decode()
        return next(line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("x-request-id"))

    def __del__(self) -> None:
        self.sock.close()

    def leave(self, *, reset: bool = False) -> None:
        """Close the connection, with a TCP reset if wanted."""
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class BlackHole:
    """A port of 127.0.0.1 where connecting gets no answer: as many connections wait to be accepted as may."""

    def __init__(self) -> None:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(0)
        self.port: int = self.listener.getsockname()[1]
        self._waiting = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._waiting.append(filler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End it."""
        for each in (*self._waiting, self.listener):
            each.close()

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def booked(daemon: Daemon, request_id: str, timeout: float = 10.0) -> dict[str, Any]:
    """The one usage row of a request, for which a busy machine may have to be waited for."""
    await until(lambda: daemon.rows_of(request_id), timeout)
    return daemon.row(request_id)


async def idle(daemon: Daemon, timeout: float = 10.0) -> None:
    """Wait until no server has a request in flight."""
    end = time.monotonic() + timeout
    while any(server["in_flight"] for server in await daemon.admin("GET", "/servers")):
        assert time.monotonic() < end, "requests are still in flight"
        await asyncio.sleep(0.02)


def memory(pid: int) -> int:
    """Bytes of memory that a process has for itself (Pss without what is mapped from files)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss_Anon":
            return int(rest.split()[0]) * 1024
    raise AssertionError("no Pss_Anon in smaps_rollup")


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are, sockets without their numbers."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()).partition(":[")[0])
        except FileNotFoundError:
            continue  # closed meanwhile
    return sorted(found)
