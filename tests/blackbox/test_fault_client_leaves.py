"""Clients that leave, at any moment and in any way: the server is let go, the row is written, nothing leaks."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from smolproxy.standin import Reply

from .clients import Client, booked, descriptors, idle
from .conftest import Site
from .harness import until

LONG = 1000  # tokens; with TOKEN_DELAY an answer that no test waits for
TOKEN_DELAY = 0.01
LEAK = ("never retrieved", "never awaited", "was destroyed", "Unclosed", "Traceback")


@pytest.fixture(autouse=True)
def slow_server(site: Site) -> None:
    site.server.engine.token_delay = TOKEN_DELAY


def assert_no_leak_logged(site: Site) -> None:
    log = site.daemon.log_text()
    assert not [word for word in LEAK if word in log]


async def rows_of_model(site: Site, count: int) -> list[dict[str, Any]]:
    """All rows of the site's model, when there are so many."""

    def rows() -> list[dict[str, Any]]:
        return site.daemon.rows("SELECT * FROM usage WHERE real_model_name = ?", [site.model])

    await until(lambda: len(rows()) >= count, 20)
    return rows()


async def check_left(site: Site, connection: int, since: float) -> dict[str, Any]:
    """The server's connection is closed within a second of the client's, and not used again. Return the row."""
    server = site.server
    await until(lambda: all(each.number != connection for each in server.connections), 1.0 - (time.monotonic() - since))
    await idle(site.daemon)
    (row,) = await rows_of_model(site, 1)
    assert row["outcome"] == "client_disconnect"
    server.engine.token_delay = 0
    answer = await site.chat(max_tokens=1)
    assert answer.status == 200
    assert server.requests[-1].connection != connection
    return row


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_in_the_middle_of_a_stream(site: Site, reset: bool) -> None:
    client = await Client(site.daemon.port).send(site.body(stream=True, max_tokens=LONG), site.key)
    seen = await client.until(b"tok9")
    client.leave(reset=reset)
    row = await check_left(site, site.generating()[0].connection, time.monotonic())
    assert (row["status"], row["tokens_source"]) == (200, "counted")
    made = site.server.counters.predicted - 1  # one in the chat afterwards
    assert seen.count(b'"content":"') - 1 <= row["completion_tokens"] <= made
    assert made - row["completion_tokens"] <= 5  # what was under way
    assert row["prompt_tokens"] > 0


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_while_the_server_thinks(site: Site, reset: bool, stream: bool) -> None:
    """Before the first byte of an answer: the prompt is being processed."""
    site.server.script.append(Reply(before=asyncio.Event()))
    client = await Client(site.daemon.port).send(site.body(stream=stream, max_tokens=LONG), site.key)
    await until(site.generating)
    client.leave(reset=reset)
    row = await check_left(site, site.generating()[0].connection, time.monotonic())
    assert (row["status"], row["completion_tokens"]) == (499, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_while_queued_in_the_server(site: Site, stream: bool) -> None:
    """All slots are taken by others, who are not disturbed."""
    slots = len(site.server.engine.slots)
    others = [asyncio.ensure_future(site.chat(stream=True, max_tokens=150)) for _ in range(slots)]
    await until(lambda: site.server.engine.busy == slots)
    client = await Client(site.daemon.port).send(site.body(stream=stream, max_tokens=LONG), site.key)
    await until(lambda: site.server.engine.deferred == 1)
    client.leave()
    await until(lambda: site.server.engine.deferred == 0, 1.0)
    assert not any(each.done() for each in others)
    for answer in await asyncio.gather(*others):
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert (await booked(site.daemon, answer.headers["x-request-id"]))["completion_tokens"] == 150
    rows = await rows_of_model(site, slots + 1)
    assert sorted(row["outcome"] for row in rows) == ["client_disconnect"] + ["ok"] * slots


async def test_while_a_plain_answer_is_generated(site: Site) -> None:
    """What was made until then is seen at the server's slots."""
    client = await Client(site.daemon.port).send(site.body(max_tokens=LONG), site.key)
    await until(lambda: any(slot.choice and slot.choice.predicted > 20 for slot in site.server.engine.slots))
    client.leave()
    row = await check_left(site, site.generating()[0].connection, time.monotonic())
    made = site.server.counters.predicted - 1
    assert 20 <= row["completion_tokens"] <= made


async def test_while_the_last_event_waits_for_its_row(site: Site) -> None:
    """Gone with the finish reason in hand, before [DONE]: all was made, all is booked."""
    site.server.engine.token_delay = 0
    client = await Client(site.daemon.port).send(site.body(stream=True, max_tokens=8), site.key)
    await client.until(b'"finish_reason":"length"')
    client.leave(reset=True)
    (row,) = await rows_of_model(site, 1)
    assert row["completion_tokens"] == 8
    assert row["outcome"] in ("ok", "client_disconnect")


@pytest.mark.parametrize("sent", [0, 1, 30, 200])
async def test_while_sending_the_request(site: Site, sent: int) -> None:
    """In the middle of the head or of the body: nothing was admitted, there is no row."""
    body = b'{"model": "%s", "messages": []}' % site.model.encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 5000\r\n\r\n%s"
        % (site.key.encode(), body)
    )
    for reset in (False, True):
        client = await Client(site.daemon.port).send_raw(request[:sent] if sent < 200 else request)
        await asyncio.sleep(0.05)
        client.leave(reset=reset)
    await idle(site.daemon)
    assert not site.generating()
    assert not site.daemon.rows("SELECT * FROM usage WHERE real_model_name = ?", [site.model])
    assert_no_leak_logged(site)


async def test_100_at_random_moments(site: Site) -> None:
    chance = random.Random(3)
    assert site.daemon.process is not None
    pid = site.daemon.process.pid
    site.server.engine.prompt_delay = 0.1
    await site.chat(max_tokens=1)
    before = descriptors(pid)

    async def one(number: int) -> None:
        stream, reset = bool(number & 1), bool(number & 2)
        client = await Client(site.daemon.port).send(
            site.body(stream=stream, max_tokens=LONG, user=f"client {number}"), site.key
        )
        wanted = b'"client %d"' % number
        await until(lambda: any(wanted in request.body for request in site.server.requests), 20)
        reading = asyncio.ensure_future(client.rest())
        await asyncio.sleep(chance.uniform(0, 0.5))
        reading.cancel()
        await asyncio.wait([reading])
        client.leave(reset=reset)

    numbers = list(range(100))
    chance.shuffle(numbers)
    for at in range(0, 100, 25):
        await asyncio.gather(*map(one, numbers[at : at + 25]))
    await until(lambda: site.server.in_flight == 0, 5)
    await idle(site.daemon)
    rows = await rows_of_model(site, 101)
    assert len(rows) == 101
    assert len({row["request_id"] for row in rows}) == 101
    assert [row["outcome"] for row in rows].count("client_disconnect") == 100
    assert {row["status"] for row in rows} <= {200, 499}
    assert sum(request.left for request in site.generating()) == 100
    # Idle connections to the server may be more or fewer; nothing else is.
    await until(lambda: len(descriptors(pid)) <= len(before) + 4)
    assert_no_leak_logged(site)


async def test_50_that_leave_before_they_are_known_to_be_served(site: Site) -> None:
    """Gone while their request is on its way: each has a row if it reached the server, none is in flight."""

    async def one(number: int) -> None:
        client = await Client(site.daemon.port).send(site.body(stream=bool(number & 1), max_tokens=LONG), site.key)
        await asyncio.sleep(number % 10 / 2000)
        client.leave(reset=bool(number & 2))

    await asyncio.gather(*map(one, range(50)))
    await asyncio.sleep(0.3)
    await idle(site.daemon)
    await until(lambda: site.server.in_flight == 0, 5)
    reached = len(site.generating())
    rows = await rows_of_model(site, reached)
    assert reached <= len(rows) <= 50
    assert {row["outcome"] for row in rows} <= {"client_disconnect"}
    assert_no_leak_logged(site)


async def test_the_key_is_free_again(site: Site) -> None:
    """A key that may ask one thing at a time can ask again at once."""
    keys = await site.daemon.admin("GET", "/keys")
    key_id = next(each["id"] for each in keys if site.key.startswith(each["prefix"]))
    await site.daemon.admin("PUT", f"/keys/{key_id}/limits", {"parallel_limit": 1})
    for number in range(4):
        client = await Client(site.daemon.port).send(site.body(stream=number < 2, max_tokens=LONG), site.key)
        await until(lambda number=number: len(site.generating()) == number + 1)
        assert (await site.chat()).status == 429
        client.leave(reset=bool(number & 1))
        await idle(site.daemon)
    site.server.engine.token_delay = 0
    assert (await site.chat(max_tokens=1)).status == 200
