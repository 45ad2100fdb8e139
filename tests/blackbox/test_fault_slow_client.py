"""Clients that do not read: memory stays flat, others keep pace, and the slow one slows its own server only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from smolproxy.standin import Reply

from .clients import MIB, Client, booked, idle, memory
from .conftest import Site
from .harness import until

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % (b"x" * 65000)


def big(kind: str) -> Reply:
    """An answer of 200 MiB."""
    if kind == "stream":
        return Reply(chunks=[EVENT] * (200 * MIB // len(EVENT)))
    if kind == "line":
        return Reply(chunks=[EVENT[:50], *[b"x" * 65536] * (200 * 16)])
    return Reply(
        chunks=[b'{"data":"', *[b"x" * 65536] * (200 * 16), b'"}'], headers={"Content-Type": "application/json"}
    )


@pytest.mark.parametrize("kind", ["stream", "line", "plain"])
async def test_an_answer_of_200_mib_that_is_never_read(site: Site, kind: str) -> None:
    assert site.daemon.process is not None
    pid = site.daemon.process.pid
    site.server.engine.token_delay = 0.005
    await site.chat(max_tokens=5, stream=True)
    before = memory(pid)
    site.server.script.append(big(kind))
    client = await Client(site.daemon.port, receive_buffer=65536).send(site.body(stream=kind != "plain"), site.key)
    await client.until(b"\r\n\r\n")
    most, gap, seen = 0, 0.0, 0

    async def pace() -> None:
        nonlocal gap, seen
        async with site.open(max_tokens=200) as response:
            last = time.perf_counter()
            async for _ in response.content.iter_any():
                now = time.perf_counter()
                gap, last, seen = max(gap, now - last), now, seen + 1

    others = [asyncio.ensure_future(pace()) for _ in range(3)]
    while not all(each.done() for each in others):
        most = max(most, memory(pid))
        await asyncio.sleep(0.05)
    await asyncio.gather(*others)
    assert most - before < 10 * MIB
    assert seen > 300
    assert gap < 1.0
    # The server waits: it has not been read empty into somewhere else.
    request = next(each for each in site.generating() if each.connection in {c.number for c in site.server.connections})
    assert not request.done
    left = time.monotonic()
    client.leave()
    await until(lambda: request.left, 2)
    assert time.monotonic() - left < 1.5
    row = await booked(site.daemon, client.request_id())
    assert (row["status"], row["outcome"]) == (200, "client_disconnect")
    await idle(site.daemon)


async def test_a_slow_reader_gets_everything(site: Site) -> None:
    """Stopped for a while in the middle, read to the end after that: not a byte is missing."""
    count = 24 * MIB // len(EVENT)
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    site.server.script.append(Reply(chunks=[*[EVENT] * count, end]))
    async with site.open() as response:
        await asyncio.sleep(1.0)
        assert not site.generating()[0].done
        body: Any = await response.read()
    assert body == EVENT * count + end
    row = await booked(site.daemon, response.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("ok", count)


async def test_many_that_do_not_read(site: Site) -> None:
    """50 at once: what each one costs is bounded, and all are let go."""
    assert site.daemon.process is not None
    pid = site.daemon.process.pid
    await site.chat(stream=True, max_tokens=5)
    before = memory(pid)
    site.server.default = big("stream")
    clients = [Client(site.daemon.port, receive_buffer=65536) for _ in range(50)]
    await asyncio.gather(*(client.send(site.body(stream=True), site.key) for client in clients))
    await asyncio.gather(*(client.until(b"\r\n\r\n") for client in clients))
    await asyncio.sleep(1.0)
    assert memory(pid) - before < 50 * 3 * MIB
    started = time.monotonic()
    assert (await site.daemon.ask("GET", "/health")).status == 200
    assert time.monotonic() - started < 3
    for client in clients:
        client.leave(reset=True)
    await idle(site.daemon)
    await until(lambda: site.server.in_flight == 0, 2)
    for client in clients:
        assert (await booked(site.daemon, client.request_id()))["outcome"] == "client_disconnect"
