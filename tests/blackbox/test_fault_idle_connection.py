"""Connections to servers that die while idle or in use: what is sent again, what is not, what is never used again."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from smolproxy.standin import Reply, Request, StandIn

from .clients import booked, idle
from .conftest import Site
from .harness import Daemon, until

# No probe and no question keeps a connection warm.
SETTINGS = {"probe_interval": 3600}


@pytest.fixture
async def quiet(site: Site) -> Site:
    """A site whose server has answered all questions, so that no connection is in use."""
    await until(lambda: any(request.path == "/props" and request.done for request in site.server.requests))
    return site


async def drop_idle(site: Site) -> None:
    """Close all connections, and have that known: the next request is on a fresh one."""
    site.server.kill_connections()
    await until(lambda: not site.server.connections)
    await site.daemon.ask("GET", "/health")  # the daemon's loop has turned since


async def test_requests_at_the_moment_when_the_server_closes(daemon: Daemon) -> None:
    """4.90 to 5.10 s apart, at a server that closes idle connections after 5 s: 210 requests, no error."""
    sent = await spaced(daemon, "edge", lanes=70, gaps=3, keep_alive=5.0, low=4.9, high=5.1)
    # No dead connection was met: smolproxy lets go first.
    assert [len({request.connection for request in lane}) for lane in sent] == [4] * 70
    assert [len(lane) for lane in sent] == [4] * 70


async def test_requests_at_the_moment_when_a_hasty_server_closes(daemon: Daemon) -> None:
    """The same at a server that closes sooner than smolproxy expects, so that dead connections are met."""
    sent = await spaced(daemon, "hasty", lanes=40, gaps=12, keep_alive=0.2, low=0.195, high=0.205)
    assert sum(map(len, sent)) >= 40 * 13


async def spaced(
    daemon: Daemon, name: str, *, lanes: int, gaps: int, keep_alive: float, low: float, high: float
) -> list[list[Request]]:
    """Many lanes, each with a server and so with a connection of its own, ask over and over with pauses.

    Return the requests that came to each server.
    """
    key = await daemon.new_key()
    chance = random.Random(lanes)

    async def lane(number: int) -> None:
        body = {"model": f"{name}-{number}", "messages": [], "max_tokens": 1}
        await asyncio.sleep(number / lanes * 0.5)
        for gap in range(gaps + 1):
            if gap:
                await asyncio.sleep(chance.uniform(low, high))
            answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
            assert answer.status == 200, answer

    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(StandIn([f"{name}-{number}"], keep_alive=keep_alive))
            for number in range(lanes)
        ]
        ids = [await daemon.add_server(server, f"{name}-{number}") for number, server in enumerate(servers)]
        await asyncio.gather(*map(lane, range(lanes)))
        for server_id in ids:
            await daemon.admin("DELETE", f"/servers/{server_id}")
    rows = daemon.rows("SELECT * FROM usage WHERE real_model_name LIKE ?", [f"{name}-%"])
    assert [row["outcome"] for row in rows] == ["ok"] * lanes * (gaps + 1)
    return [[request for request in server.requests if request.path == "/v1/chat/completions"] for server in servers]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reused_connection_that_is_dead_is_replaced_once(quiet: Site, stream: bool) -> None:
    site = quiet
    assert (await site.chat(max_tokens=1)).status == 200
    first = site.generating()[0]
    site.server.script.append(Reply(no_answer=True))
    answer = await site.chat(stream=stream, max_tokens=3)
    assert answer.status == 200
    asked = site.generating()
    assert len(asked) == 3
    assert asked[1].connection == first.connection
    assert asked[1].number > 1
    assert asked[2].number == 1  # a fresh one
    assert asked[1].body == asked[2].body
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("ok", 3)
    await idle(site.daemon)


async def test_not_more_than_once(quiet: Site) -> None:
    """A request that kills each connection is sent twice at most, however many connections idle in the pool."""
    site = quiet
    gate = asyncio.Event()
    site.server.script += [Reply(before=gate), Reply(before=gate)]
    asking = [asyncio.ensure_future(site.chat(max_tokens=1)) for _ in range(2)]
    await site.server.wait_for(lambda: site.server.in_flight == 2)
    gate.set()
    await asyncio.gather(*asking)
    assert len(site.server.connections) > 1
    before = len(site.generating())
    site.server.default = Reply(no_answer=True)
    answer = await site.chat(max_tokens=3)
    assert (answer.status, answer.code) == (502, "server_unreachable")
    assert len(site.generating()) - before == 2
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"]) == (502, "server_unreachable", "none")
    await idle(site.daemon)


@pytest.mark.parametrize("before", [None, 0.3])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_fresh_connection_accepted_is_not_sent_twice(
    quiet: Site, before: float | None, stream: bool
) -> None:
    site = quiet
    await drop_idle(site)
    site.server.script.append(Reply(before=before, no_answer=True))
    answer = await site.chat(stream=stream)
    assert (answer.status, answer.code) == (502, "server_unreachable")
    (asked,) = site.generating()
    assert asked.number == 1
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["outcome"], row["prompt_tokens"], row["completion_tokens"]) == ("server_unreachable", 0, 0)


async def test_what_a_reused_connection_accepted_is_not_sent_twice(quiet: Site) -> None:
    """Reset after a time in which a dead connection would have shown: the server may have worked on it."""
    site = quiet
    await site.chat(max_tokens=1)
    site.server.script.append(Reply(before=1.3, no_answer=True))
    answer = await site.chat()
    assert (answer.status, answer.code) == (502, "server_unreachable")
    assert len(site.generating()) == 2
    assert site.generating()[1].number > 1


async def test_an_answer_that_has_begun_is_not_asked_for_again(quiet: Site) -> None:
    site = quiet
    await site.chat(max_tokens=1)
    site.server.script.append(Reply(cut=10, then="reset"))
    assert (await site.chat()).status == 502
    assert len(site.generating()) == 2


async def test_another_server_is_tried_when_one_cannot_be_reached(daemon: Daemon) -> None:
    """Nothing was sent to it, so nothing is done twice; the one that answers does it once."""
    key = await daemon.new_key()
    async with StandIn(["shared"]) as dead, StandIn(["shared"]) as alive:
        ids = [await daemon.add_server(dead, "dead"), await daemon.add_server(alive, "alive")]
        await dead.stop()
        for _ in range(6):
            body = {"model": "shared", "messages": [], "max_tokens": 1}
            answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
            assert answer.status == 200
            assert (await booked(daemon, answer.headers["x-request-id"]))["server_id"] == ids[1]
        assert sum(request.path == "/v1/chat/completions" for request in alive.requests) == 6
        for server_id in ids:
            await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_a_connection_is_not_used_again_after_a_stream(daemon: Daemon) -> None:
    """Not even one that the server keeps: llama-server promises to and closes it, sooner or later."""
    key = await daemon.new_key()
    async with StandIn(["keeping"], keep_after_stream=True) as server:
        server_id = await daemon.add_server(server, "keeping")
        for stream in (True, True, False, True, False, False):
            body = {"model": "keeping", "messages": [], "max_tokens": 2, "stream": stream}
            server.script.append(Reply(delay=0.01))
            assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status == 200
        asked = [request for request in server.requests if request.path == "/v1/chat/completions"]
        for at, request in enumerate(asked):
            if request.json["stream"]:
                assert all(request.connection != later.connection for later in server.requests if later.at > request.at)
            elif at and not asked[at - 1].json["stream"]:
                assert request.connection == asked[at - 1].connection
        await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_a_server_that_closes_after_each_stream(quiet: Site) -> None:
    """As llama-server does, without saying so: streams in a row, and plain answers between them."""
    for number in range(40):
        answer = await quiet.chat(stream=number % 3 != 0, max_tokens=1)
        assert answer.status == 200
    # None was found dead: a connection that had a stream is not kept.
    assert len(quiet.generating()) == 40


async def test_the_last_answer_on_a_connection(daemon: Daemon) -> None:
    key = await daemon.new_key()
    async with StandIn(["few"], max_answers=3) as server:
        server_id = await daemon.add_server(server, "few")
        for _ in range(20):
            body = {"model": "few", "messages": [], "max_tokens": 1}
            assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status == 200
        assert sum(request.path == "/v1/chat/completions" for request in server.requests) == 20
        await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_no_proxy_of_the_environment_is_used(make_daemon: Any) -> None:
    trapped: list[Any] = []
    trap = await asyncio.start_server(lambda reader, writer: trapped.append(writer) or writer.close(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{trap.sockets[0].getsockname()[1]}"
    names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    env: dict[str, str | None] = {**dict.fromkeys(names, url), "NO_PROXY": "", "no_proxy": ""}
    daemon = make_daemon(env=env)
    daemon.start()
    async with StandIn() as server:
        await daemon.add_server(server)
        key = await daemon.new_key()
        for stream in (False, True):
            body = {"model": "m1", "messages": [], "stream": stream, "max_tokens": 2}
            assert (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status == 200
    assert not trapped
    trap.close()
    await trap.wait_closed()
