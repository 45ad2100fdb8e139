"""The daemon's life: signals, draining, the config file anew."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from smolproxy.standin import Reply, StandIn

from .harness import Daemon, until

Make = Callable[..., Daemon]
CHAT = "/v1/chat/completions"


@dataclass
class Place:
    """A daemon of the test's own, with a server and a key."""

    daemon: Daemon
    server: StandIn
    key: str

    def open(self, **fields: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 6, **fields}
        return self.daemon.open("POST", CHAT, key=self.key, json=body)


@pytest.fixture
async def place(make_daemon: Make, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    settings = getattr(request, "param", {})
    async with StandIn(["m"], notice=0.1) as server:
        daemon = make_daemon(settings=settings).start()
        await daemon.add_server(server, "one")
        yield Place(daemon, server, await daemon.new_key())


def refuses(daemon: Daemon) -> bool:
    """Whether no new connection comes about."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", daemon.port)) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
async def test_open_streams_finish_new_connections_are_refused_and_the_exit_is_0(
    place: Place, number: signal.Signals
) -> None:
    gate = asyncio.Event()
    place.server.script.append(Reply(hold={3: gate}))
    async with place.open() as response, aiohttp.ClientSession() as session:
        # a connection that is there already, but has no request open
        async with session.get(place.daemon.url("/health")) as health:
            assert (await health.json())["status"] == "ok"
        await response.content.readany()
        place.daemon.signal(number)
        await until(lambda: place.daemon.logged("stopping", open_requests=1))
        await until(lambda: refuses(place.daemon))
        body = {"model": "m", "messages": []}
        headers = {"Authorization": f"Bearer {place.key}"}
        async with session.post(place.daemon.url(CHAT), json=body, headers=headers) as late:
            assert late.status == 503
            assert (await late.json())["error"]["code"] == "shutting_down"
            assert int(late.headers["Retry-After"]) > 0
        gate.set()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert await place.daemon.ended() == 0
    row = place.daemon.row(response.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("ok", 6)
    assert place.daemon.logged("stopped")
    assert "Traceback" not in place.daemon.log_text()


async def test_a_plain_answer_in_the_making_is_finished(place: Place) -> None:
    gate = asyncio.Event()
    place.server.script.append(Reply(before=gate))
    asking = asyncio.ensure_future(
        place.daemon.ask("POST", CHAT, key=place.key, json={"model": "m", "messages": [], "max_tokens": 2})
    )
    await place.server.wait_for(lambda: place.server.in_flight == 1)
    place.daemon.signal(signal.SIGTERM)
    await until(lambda: place.daemon.logged("stopping"))
    gate.set()
    answer = await asking
    assert answer.status == 200
    assert await place.daemon.ended() == 0
    assert place.daemon.row(answer.headers["x-request-id"])["outcome"] == "ok"


@pytest.mark.parametrize("place", [{"drain_timeout": 0.2}], indirect=True)
async def test_what_does_not_finish_in_time_is_told_so_and_booked(place: Place) -> None:
    place.server.script += [Reply(hold={3: asyncio.Event()}), Reply(before=asyncio.Event())]
    async with place.open() as response:
        received = await response.content.readany()
        plain = asyncio.ensure_future(
            place.daemon.ask("POST", CHAT, key=place.key, json={"model": "m", "messages": []})
        )
        await place.server.wait_for(lambda: place.server.in_flight == 2)
        started = time.monotonic()
        place.daemon.signal(signal.SIGTERM)
        received += await response.content.read()
        assert 0.1 < time.monotonic() - started < 10
    last = [event for event in received.split(b"\n\n") if event][-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert b"[DONE]" not in received
    answer = await plain
    assert (answer.status, answer.code) == (503, "shutting_down")
    assert await place.daemon.ended() == 0
    row = place.daemon.row(response.headers["x-request-id"])
    assert (row["status"], row["tokens_source"]) == (200, "counted")
    assert row["outcome"] in ("timeout", "server_error")
    assert row["completion_tokens"] == 2
    assert place.daemon.row(answer.headers["x-request-id"])["status"] == 503
    await place.server.wait_for(lambda: place.server.in_flight == 0)


@pytest.mark.parametrize("place", [{"drain_timeout": 0}], indirect=True)
async def test_without_a_drain_timeout_nothing_is_waited_for(place: Place) -> None:
    place.server.script.append(Reply(hold={3: asyncio.Event()}))
    async with place.open() as response:
        received = await response.content.readany()
        place.daemon.signal(signal.SIGTERM)
        received += await asyncio.wait_for(response.content.read(), 5)
    assert b"shutting_down" in received
    assert await place.daemon.ended() == 0


async def test_a_second_signal_ends_at_once(place: Place) -> None:
    place.server.script.append(Reply(hold={3: asyncio.Event()}))
    async with place.open() as response:
        await response.content.readany()
        place.daemon.signal(signal.SIGTERM)
        await until(lambda: place.daemon.logged("stopping"))
        started = time.monotonic()
        place.daemon.signal(signal.SIGTERM)
        assert await place.daemon.ended(5) != 0
        assert time.monotonic() - started < 3
        row = place.daemon.row(response.headers["x-request-id"])
    place.daemon.process = None
    assert (row["outcome"], row["status"], row["tokens_source"]) == ("timeout", 200, "counted")
    assert row["completion_tokens"] > 0


async def test_an_idle_daemon_ends_at_once(place: Place) -> None:
    async with aiohttp.ClientSession() as session, session.get(place.daemon.url("/health")) as health:
        await health.read()
        started = time.monotonic()
        place.daemon.signal(signal.SIGTERM)
        assert await place.daemon.ended() == 0
        assert time.monotonic() - started < 5


async def test_the_config_file_is_loaded_anew_by_sighup_and_a_stream_goes_on(place: Place) -> None:
    gate = asyncio.Event()
    place.server.script.append(Reply(hold={3: gate}))
    async with StandIn(["n"]) as other, place.open() as response:
        await response.content.readany()
        place.daemon.configure({"servers": [{"name": "two", "url": other.url, "models": ["n"]}], "aliases": {"a": "n"}})
        place.daemon.signal(signal.SIGHUP)
        await until(lambda: place.daemon.logged("config file loaded"))
        answer = await place.daemon.ask("POST", CHAT, key=place.key, json={"model": "a", "messages": []})
        assert answer.status == 200
        names = [row["name"] for row in await place.daemon.admin("GET", "/servers")]
        assert names == ["one", "two"]  # what is only in the database stays

        (place.daemon.folder / "config.yaml").write_text("servers: 5\nsettings: {retention_days: never}\n")
        place.daemon.signal(signal.SIGHUP)
        await until(lambda: len(place.daemon.logged("config file not loaded")) == 2)
        problems = place.daemon.logged("config file not loaded")
        assert "config.yaml:1:" in problems[0]["problem"]
        assert "config.yaml:2:" in problems[1]["problem"]
        assert [row["name"] for row in await place.daemon.admin("GET", "/servers")] == names

        # good by itself, but not with what is in the database
        place.daemon.configure({"aliases": {"n": "m"}})
        place.daemon.signal(signal.SIGHUP)
        await until(lambda: len(place.daemon.logged("config file not loaded")) == 3)
        assert place.daemon.process is not None
        assert place.daemon.process.poll() is None
        gate.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_the_config_file_is_merged_at_every_start(make_daemon: Make) -> None:
    async with StandIn(["m"], api_key="k") as server:
        entry = {"name": "one", "url": server.url, "api_key": "k", "models": ["m"], "slots": 2}
        daemon = make_daemon(config={"servers": [entry], "aliases": {"a": "m", "later": "unknown"}}).start()
        assert any("unknown" in record["warning"] for record in daemon.logged("config", level="warning"))
        (row,) = await daemon.admin("GET", "/servers")
        assert (row["name"], row["models"], row["slots"], row["has_api_key"]) == ("one", ["m"], 2, True)
        key = await daemon.new_key("kept", rpm_limit=100)
        assert (await daemon.ask("POST", CHAT, key=key, json={"model": "a", "messages": []})).status == 200
        await daemon.admin("POST", "/aliases", {"alias_name": "own", "real_model_name": "m"})
        assert daemon.stop() == 0

        del entry["api_key"]
        daemon.configure({"servers": [{**entry, "models": ["n"], "slots": 3}], "aliases": {"a": "n"}})
        daemon.start()
        (row,) = await daemon.admin("GET", "/servers")
        assert (row["models"], row["slots"], row["has_api_key"]) == (["n"], 3, True)
        aliases = {row["alias_name"]: row["real_model_name"] for row in await daemon.admin("GET", "/aliases")}
        assert aliases == {"a": "n", "later": "unknown", "own": "m"}
        assert (await daemon.ask("POST", CHAT, key=key, json={"model": "a", "messages": []})).status == 200
        (kept,) = await daemon.admin("GET", "/keys")
        assert (kept["name"], kept["rpm_limit"]) == ("kept", 100)
        assert len((await daemon.admin("GET", "/usage"))["logs"]) == 2


async def test_the_log_is_lines_of_json_and_quiet_if_so_set(make_daemon: Make) -> None:
    daemon = make_daemon(settings={"access_log": False}).start()
    await daemon.ask("GET", "/health")
    assert daemon.stop() == 0
    lines = daemon.log_text().splitlines()
    assert len(lines) == len([json.loads(line) for line in lines])
    assert not daemon.logged("request")

    daemon.configure({"settings": {"log_format": "console"}})
    before = len(lines)
    daemon.spawn()
    await until(lambda: "listening" in "".join(daemon.log_text().splitlines()[before:]), timeout=30)
    assert daemon.stop() == 0
    assert not [line for line in daemon.log_text().splitlines()[before:] if line.startswith("{")]
