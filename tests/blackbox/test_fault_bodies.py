"""Fault: bodies so large that reading, keeping or refusing them could bring the daemon down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from smolproxy.standin import Reply, StandIn

from .clients import Client
from .conftest import Site
from .harness import Daemon

MIB = 1024 * 1024
CHAT = "/v1/chat/completions"
ANSWER = Reply(body={"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


def body_of(site: Site, mib: int) -> bytes:
    """A chat with an image of so many MiB."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}
    frame = json.dumps(site.body(messages=[{"role": "user", "content": [image]}], model="fast"))
    return frame.replace("%s", "iVBORw0K" * (mib * MIB // 8)).encode()


def peak(daemon: Daemon, *, reset: bool = False) -> int:
    """The most memory that the process had at a time, in bytes."""
    assert daemon.process is not None
    if reset:
        Path(f"/proc/{daemon.process.pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.fixture
async def site(daemon: Daemon) -> AsyncIterator[Site]:
    async with StandIn(["a model with a name longer than its alias"], slots=16) as server:
        server.default = ANSWER
        server_id = await daemon.add_server(server)
        await daemon.ask("DELETE", "/admin/aliases/fast", key=daemon.env["ADMIN_KEY"])
        await daemon.admin("POST", "/aliases", {"alias_name": "fast", "real_model_name": server.models[0]})
        yield Site(daemon, server, server.models[0], await daemon.new_key(), server_id)
        await daemon.admin("DELETE", f"/servers/{server_id}")


def head(key: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines, "", "")).encode()


def chunked(data: bytes, size: int = 256 * 1024) -> bytes:
    """The data in HTTP chunks."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


@pytest.mark.parametrize("how", ["length", "chunked", "expect"])
async def test_60_mib_reach_the_server_as_they_are(site: Site, how: str) -> None:
    body = body_of(site, 60)
    lines = {
        "length": (f"Content-Length: {len(body)}",),
        "chunked": ("Transfer-Encoding: chunked",),
        "expect": (f"Content-Length: {len(body)}", "Expect: 100-continue"),
    }[how]
    client = Client(site.daemon.port)
    await client.send_raw(head(site.key, *lines))
    if how == "expect":
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.read = b""
    await asyncio.get_running_loop().sock_sendall(client.sock, chunked(body) if how == "chunked" else body)
    assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    client.leave()
    # nothing but the alias is another
    assert site.generating()[-1].body == body.replace(b'"fast"', json.dumps(site.model).encode(), 1)
    assert site.daemon.row(client.request_id())["outcome"] == "ok"


async def test_ten_at_once_cost_at_most_three_times_their_size(site: Site) -> None:
    site.server.keep_requests = False
    body = body_of(site, 25)
    whole = head(site.key, f"Content-Length: {len(body)}")
    all_there = asyncio.Event()
    site.server.default = Reply(body=ANSWER.body, before=all_there)
    before = peak(site.daemon, reset=True)
    clients = [Client(site.daemon.port) for _ in range(10)]
    await asyncio.gather(*(client.send_raw(whole) for client in clients))
    sending = [asyncio.get_running_loop().sock_sendall(client.sock, body) for client in clients]
    sent = asyncio.gather(*sending)
    await site.server.wait_for(lambda: site.server.in_flight == 10, 60)
    await sent
    all_there.set()
    for client in clients:
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client.leave()
    cost = (peak(site.daemon) - before) / (10 * len(body))
    print(f"ten bodies at once cost {cost:.2f} times their size")
    assert cost <= 3


@pytest.mark.parametrize("lines", [("Content-Length: 62914560",), ("Transfer-Encoding: chunked",)])
@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
@pytest.mark.parametrize("key", ["wrong", None])
async def test_a_stranger_is_refused_before_the_body_is_read(
    site: Site, lines: tuple[str, ...], expect: tuple[str, ...], key: str | None
) -> None:
    asked = head(key or "", *lines, *expect)
    if key is None:
        asked = asked.replace(b"Authorization: Bearer \r\n", b"")
    answer = await site.daemon.raw(asked)  # not a byte of the body is sent
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert not site.generating()


async def test_a_stranger_who_sends_all_the_same_costs_no_memory(site: Site) -> None:
    before = peak(site.daemon, reset=True)
    client = Client(site.daemon.port)
    await client.send_raw(head("wrong", f"Content-Length: {60 * MIB}"))
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):  # it need not listen to all of it
        await asyncio.wait_for(loop.sock_sendall(client.sock, bytes(60 * MIB)), 20)
    client.leave()
    assert peak(site.daemon) - before < 10 * MIB


@pytest.mark.parametrize("how", ["length", "chunked"])
async def test_beyond_the_limit_a_client_that_sends_all_gets_its_413(site: Site, how: str) -> None:
    """The client reads nothing until it has sent everything, as most do."""
    body = body_of(site, 65)
    lines = (f"Content-Length: {len(body)}",) if how == "length" else ("Transfer-Encoding: chunked",)
    before = peak(site.daemon, reset=True)
    client = Client(site.daemon.port)
    await client.send_raw(head(site.key, *lines))
    await asyncio.get_running_loop().sock_sendall(client.sock, chunked(body) if how == "chunked" else body)
    answer = await client.until(b"}}")
    client.leave()
    assert answer.startswith(b"HTTP/1.1 413 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "body_too_large"
    assert "64 MiB" in error["message"]
    assert not site.generating()
    assert peak(site.daemon) - before < (10 if how == "length" else 2 * 65) * MIB


async def test_others_are_served_while_large_bodies_come(site: Site) -> None:
    site.server.keep_requests = False
    body = body_of(site, 25)
    longest = 0.0
    clients = [Client(site.daemon.port) for _ in range(3)]
    sending = [
        asyncio.create_task(client.send_raw(head(site.key, f"Content-Length: {len(body)}") + body))
        for client in clients
    ]
    while not all(task.done() for task in sending):
        started = time.monotonic()
        assert (await site.daemon.ask("GET", "/health")).status == 200
        longest = max(longest, time.monotonic() - started)
    for client in clients:
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client.leave()
    print(f"/health took {longest:.3f} s at most")
    assert longest < 2
