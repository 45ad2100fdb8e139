"""A client that goes away: its row, the server's connection, the slot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from smolproxy.standin import Reply

from .conftest import Site
from .harness import bearer, until


async def left(site: Site, *, before: float = 1.0) -> dict[str, Any]:
    """Wait until the server's connection is closed, in `before` seconds, and return the row."""
    await site.server.wait_for(lambda: site.server.closed_early == 1, timeout=before)
    (row,) = await until(lambda: site.daemon.rows("SELECT * FROM usage WHERE model_name = ?", [site.model]))
    assert row["outcome"] == "client_disconnect"
    assert row["server_id"] == site.server_id
    await free(site)
    return row


async def free(site: Site) -> None:
    """The server's slot is free again, and no request of smolproxy's is counted there."""
    await site.server.wait_for(lambda: site.server.in_flight == 0)
    (shown,) = [each for each in await site.daemon.admin("GET", "/servers") if each["id"] == site.server_id]
    assert shown["in_flight"] == 0


async def test_while_streaming(site: Site) -> None:
    gate = asyncio.Event()
    site.server.script.append(Reply(hold={6: gate}))
    async with site.open(max_tokens=100) as response:
        received = b""
        while received.count(b"\n\n") < 6:
            received += await response.content.readany()
        request_id = response.headers["x-request-id"]
    row = await left(site)
    assert (row["request_id"], row["status"], row["stream"]) == (request_id, 200, 1)
    assert row["tokens_source"] == "counted"
    assert row["prompt_tokens"] == site.server.counters.prompt_tokens + row["cached_tokens"] > 0
    # one event tells the role, five a token each
    assert row["completion_tokens"] == 5
    assert row["ttft_ms"] is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_byte(site: Site, stream: bool) -> None:
    site.server.script.append(Reply(before=30.0))
    asking = asyncio.ensure_future(site.chat(stream=stream))
    await site.server.wait_for(lambda: site.server.in_flight == 1)
    asking.cancel()
    row = await left(site)
    assert (row["status"], row["stream"]) == (499, stream)
    assert row["completion_tokens"] == 0
    assert row["ttft_ms"] is None


async def test_while_a_plain_answer_is_made(site: Site) -> None:
    site.server.engine.token_delay = 0.02
    asking = asyncio.ensure_future(site.chat(max_tokens=1000))
    await site.server.wait_for(
        lambda: any(slot.choice is not None and slot.choice.predicted > 5 for slot in site.server.engine.slots)
    )
    asking.cancel()
    row = await left(site)
    assert row["status"] == 499
    assert row["tokens_source"] == "counted"
    assert row["prompt_tokens"] > 0


async def test_while_it_sends_its_request(site: Site) -> None:
    body = b'{"model": "' + site.model.encode() + b'", "messages": ['
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    head += b"".join(f"{name}: {value}\r\n".encode() for name, value in bearer(site.key).items())
    _, writer = await asyncio.open_connection("127.0.0.1", site.daemon.port)
    writer.write(head + b"\r\n" + body)
    await writer.drain()
    writer.close()
    await until(lambda: site.daemon.logged("request", status=499, path="/v1/chat/completions"))
    assert not site.generating()
    assert not site.daemon.rows("SELECT * FROM usage WHERE model_name = ?", [site.model])


async def test_one_that_waits_for_a_model_that_loads(site: Site) -> None:
    site.server.loading = True
    asking = asyncio.ensure_future(site.chat())
    await site.server.wait_for(lambda: len(site.generating()) == 1)
    asking.cancel()
    (row,) = await until(lambda: site.daemon.rows("SELECT * FROM usage WHERE model_name = ?", [site.model]))
    assert (row["status"], row["outcome"]) == (499, "client_disconnect")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (0, 0)
    assert len(site.generating()) == 1


async def test_a_slow_reader_that_leaves_does_not_stop_others(site: Site) -> None:
    site.server.script.append(Reply(hold={3: asyncio.Event()}))
    async with site.open(max_tokens=100) as response:
        await response.content.readany()
        assert (await site.chat(max_tokens=3)).status == 200
    await site.server.wait_for(lambda: site.server.closed_early == 1, timeout=1.0)
    assert (await site.chat(max_tokens=3)).status == 200


async def test_many_at_once_leave_nothing_behind(site: Site) -> None:
    site.server.default = Reply(hold={3: asyncio.Event()})

    async def come_and_go() -> None:
        async with site.open(max_tokens=100) as response:
            await response.content.readany()

    await asyncio.gather(*(come_and_go() for _ in range(16)))
    await until(lambda: len(site.daemon.rows("SELECT * FROM usage WHERE model_name = ?", [site.model])) == 16)
    rows = site.daemon.rows("SELECT outcome FROM usage WHERE model_name = ?", [site.model])
    assert {row["outcome"] for row in rows} == {"client_disconnect"}
    await free(site)
