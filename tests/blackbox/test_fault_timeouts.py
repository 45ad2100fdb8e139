"""Servers that are slow, silent or not there: what ends by a setting, and what does not end by default."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from smolproxy.standin import Reply, StandIn

from .clients import BlackHole, booked, idle
from .conftest import Site
from .harness import Daemon, until

SETTINGS = {"connect_timeout": 0.5, "first_byte_timeout": 0.5, "idle_timeout": 0.5, "probe_interval": 3600}

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


async def test_first_byte(site: Site) -> None:
    for stream in (False, True):
        site.server.script.append(Reply(before=asyncio.Event()))
        started = time.monotonic()
        answer = await site.chat(stream=stream)
        assert 0.4 < time.monotonic() - started < 4
        assert (answer.status, answer.code) == (504, "server_timeout")
        assert "first_byte_timeout (0.5 s)" in answer.message
        request = site.generating()[-1]
        await until(lambda request=request: request.left, 1)
        row = await booked(site.daemon, answer.headers["x-request-id"])
        assert (row["status"], row["outcome"], row["tokens_source"]) == (504, "timeout", "counted")
        assert row["prompt_tokens"] > 0
        assert row["completion_tokens"] == 0
    await idle(site.daemon)
    assert len(site.generating()) == 2  # not sent again
    assert (await site.chat()).status == 200
    assert site.generating()[2].connection not in {request.connection for request in site.generating()[:2]}


async def test_silence_within_a_stream(site: Site) -> None:
    site.server.script.append(Reply(chunks=[TOKEN, TOKEN, asyncio.Event()]))
    started = time.monotonic()
    answer = await site.chat(stream=True)
    assert 0.4 < time.monotonic() - started < 4
    assert answer.status == 200
    assert answer.body.startswith(TOKEN + TOKEN + b"data: ")
    error = json.loads(answer.body.removeprefix(TOKEN + TOKEN + b"data: "))["error"]
    assert error["code"] == "server_timeout"
    assert "idle_timeout (0.5 s)" in error["message"]
    await until(lambda: site.generating()[0].left, 1)
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["completion_tokens"]) == (200, "timeout", 2)
    await idle(site.daemon)


async def test_silence_within_a_plain_answer(site: Site) -> None:
    site.server.script.append(Reply(cut=10, then="hang"))
    answer = await site.chat()
    assert (answer.status, answer.code) == (504, "server_timeout")
    assert "idle_timeout (0.5 s)" in answer.message
    await until(lambda: site.generating()[0].left, 1)
    row = await booked(site.daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"]) == (504, "timeout")
    assert row["prompt_tokens"] > 0
    await idle(site.daemon)


async def test_timeouts_are_of_silence_not_of_the_whole(site: Site) -> None:
    """An answer that goes on for longer than each of them, never silent for so long, comes to its end."""
    site.server.script.append(Reply(before=0.2, chunks=[*[TOKEN, 0.2] * 6, END]))
    answer = await site.chat(stream=True)
    assert answer.body == TOKEN * 6 + END
    assert (await booked(site.daemon, answer.headers["x-request-id"]))["outcome"] == "ok"


async def ask_black_hole(daemon: Daemon, hole: BlackHole, stream: bool = False) -> Any:
    name = f"hole-{hole.port}"
    server = {"name": name, "url": hole.url, "models": [name]}
    server_id = (await daemon.admin("POST", "/servers", server))["id"]
    key = await daemon.new_key()
    try:
        body = {"model": name, "messages": [], "stream": stream}
        return await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
    finally:
        await daemon.admin("DELETE", f"/servers/{server_id}")


@pytest.mark.parametrize("stream", [False, True])
async def test_connecting_to_a_black_hole(daemon: Daemon, stream: bool) -> None:
    with BlackHole() as hole:
        started = time.monotonic()
        answer = await ask_black_hole(daemon, hole, stream)
        assert 0.4 < time.monotonic() - started < 2
    assert (answer.status, answer.code) == (504, "server_timeout")
    assert "connect_timeout (0.5 s)" in answer.message
    row = await booked(daemon, answer.headers["x-request-id"])
    assert (row["status"], row["outcome"], row["tokens_source"]) == (504, "timeout", "none")
    await idle(daemon)


async def test_a_black_hole_beside_a_server_that_answers(daemon: Daemon) -> None:
    """What was not sent anywhere is sent to the other one."""
    key = await daemon.new_key()
    with BlackHole() as hole:
        async with StandIn(["twin"]) as server:
            server_id = await daemon.add_server(server, "twin-b")
            hole_id = (await daemon.admin("POST", "/servers", {"name": "twin-a", "url": hole.url, "models": ["twin"]}))[
                "id"
            ]
            for _ in range(4):
                body = {"model": "twin", "messages": [], "max_tokens": 1}
                answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)
                assert answer.status == 200
            for each in (server_id, hole_id):
                await daemon.admin("DELETE", f"/servers/{each}")


async def test_by_default_silence_passes_and_a_black_hole_does_not(make_daemon: Callable[..., Daemon]) -> None:
    """Silence of 7 s (for many minutes) before the answer, between events and within a plain answer."""
    daemon = make_daemon(settings={"probe_interval": 5})
    daemon.start()
    key = await daemon.new_key()
    quiet = 7.0
    async with StandIn(slots=8) as server:
        await daemon.add_server(server)
        body = {"model": "m1", "messages": [], "max_tokens": 3}
        plain = b'{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}'
        kind = {"Content-Type": "application/json"}

        async def ask(reply: Reply, **fields: Any) -> Any:
            server.script.append(reply)
            asking = asyncio.ensure_future(daemon.ask("POST", "/v1/chat/completions", key=key, json={**body, **fields}))
            await until(lambda: not server.script)
            return asking

        asked = [
            await ask(Reply(before=quiet)),
            await ask(Reply(before=quiet), stream=True),
            await ask(Reply(chunks=[TOKEN, quiet, TOKEN, END]), stream=True),
            await ask(Reply(chunks=[plain[:20], quiet, plain[20:]], headers=kind)),
        ]
        started = time.monotonic()
        with BlackHole() as hole:
            lost = await ask_black_hole(daemon, hole)
            assert 4.5 < time.monotonic() - started < 6.5
        assert (lost.status, lost.code) == (504, "server_timeout")
        assert "connect_timeout (5 s)" in lost.message
        answers = await asyncio.gather(*asked)
        assert time.monotonic() - started > quiet - 1
        for answer in answers:
            assert answer.status == 200
            assert b"error" not in answer.body
            assert (await booked(daemon, answer.headers["x-request-id"]))["outcome"] == "ok"
        assert answers[2].body == TOKEN + TOKEN + END
        assert answers[3].body == plain


async def test_none_is_zero(make_daemon: Callable[..., Daemon]) -> None:
    """With a timeout of 0 connecting goes on until the server has room."""
    daemon = make_daemon(settings={"connect_timeout": 0, "first_byte_timeout": 0, "probe_interval": 3600})
    daemon.start()
    with BlackHole() as hole:
        asking = asyncio.ensure_future(ask_black_hole(daemon, hole))
        done, _ = await asyncio.wait([asking], timeout=1.5)
        assert not done
        hole.close()  # from now on it is refused
        answer = await asyncio.wait_for(asking, 30)
    assert (answer.status, answer.code) == (502, "server_unreachable")
