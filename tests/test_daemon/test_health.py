"""What probes and failures teach of a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from smolproxy.daemon import health as module
from smolproxy.daemon.health import Health, describe, is_loading
from smolproxy.daemon.servers import Server
from smolproxy.settings import Settings
from smolproxy.standin import Reply, StandIn
from smolproxy.store import servers as store

Make = Callable[..., Server]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Make a server of the daemon."""
    made: list[Server] = []

    def build(url: str, **fields: Any) -> Server:
        given = {"name": "one", "active": True, "models": (), "slots": None, **fields}
        record = store.Server(id=1, url=url, created_at=0, **given)
        made.append(Server(record, Settings()))
        return made[-1]

    yield build
    for server in made:
        await server.close()


def health(**settings: Any) -> Health:
    return Health(Settings(**{"probe_interval": 0.01, "probe_timeout": 0.3, **settings}), lambda: None)


@pytest.mark.parametrize(
    ("status", "answer", "loading"),
    [
        (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, True),
        (503, {"error": {"message": "no slot available"}}, False),
        (503, {"error": "Loading model"}, False),
        (503, {"error": {"message": None}}, False),
        (503, [], False),
        (503, None, False),
        (500, {"error": {"message": "Loading model"}}, False),
        (200, {"error": {"message": "Loading model"}}, False),
    ],
)
def test_loading(status: int, answer: Any, loading: bool) -> None:
    assert is_loading(status, answer) is loading


async def test_a_server_that_answers_is_up_and_tells_of_itself(make: Make) -> None:
    async with StandIn(["m", "n"], slots=3) as standin:
        server = make(standin.url)
        changes: list[int] = []
        watcher = Health(Settings(), lambda: changes.append(1))
        await watcher.probe(server)
        assert (server.state, server.last_error) == ("up", None)
        await watcher.discover(server)
        assert (server.models, server.slots, changes) == (("m", "n"), 3, [1])
        await watcher.discover(server)
        assert changes == [1]
        server.in_flight = 3
        assert server.state == "busy"


async def test_what_an_admin_says_counts_more_than_what_a_server_tells(make: Make) -> None:
    async with StandIn(["m", "n"], slots=3) as standin:
        server = make(standin.url, models=("listed",), listed=True, slots=2)
        await health().discover(server)
        assert (server.models, server.slots) == (("listed",), 2)


async def test_down_loading_and_up_again(make: Make) -> None:
    async with StandIn() as standin:
        server = make(standin.url)
        standin.loading = True
        await health().probe(server)
        assert (server.state, server.last_error) == ("loading", "loading its model")
        standin.loading = False
        standin.on["/health"] = Reply(status=500)
        await health().probe(server)
        assert (server.state, server.last_error) == ("down", "/health answered 500")
        del standin.on["/health"]
        await health().probe(server)
        assert (server.state, server.last_error) == ("up", None)
        await standin.stop()
        await health().probe(server)
        assert server.state == "down"
        assert server.last_error is not None
        assert "http" not in server.last_error
        server.record = replace(server.record, active=False)
        assert server.state == "disabled"


async def test_a_probe_without_an_answer_proves_nothing_while_requests_run(make: Make) -> None:
    async with StandIn() as standin:
        server = make(standin.url)
        await health().probe(server)
        standin.on["/health"] = Reply(before=30.0)
        server.in_flight = 1
        await health(probe_timeout=0.05).probe(server)
        assert server.state == "up"
        server.in_flight = 0
        await health(probe_timeout=0.05).probe(server)
        assert server.state == "down"
        assert server.last_error == "no answer to /health within 0.05 s"


async def test_a_wrong_key_is_found_out_and_a_right_one(make: Make) -> None:
    async with StandIn(api_key="right") as standin:
        server = make(standin.url, api_key="wrong")
        await health().probe(server)
        assert server.state == "up"  # /health is public
        await health().discover(server)
        assert server.state == "wrong_key"
        await health().probe(server)
        assert server.state == "wrong_key"
        standin._endpoints.api_key = None
        await health().discover(server)
        assert server.state == "up"


@pytest.mark.parametrize(
    "body",
    [{"data": "m"}, [], {"data": [1, {"id": 2}, {}]}, b"not JSON"],
    ids=str,
)
async def test_a_list_of_models_that_is_none(make: Make, body: Any) -> None:
    async with StandIn() as standin:
        standin.on["/v1/models"] = Reply(body=body)
        standin.on["/props"] = Reply(body={"total_slots": -1})
        server = make(standin.url)
        await health().discover(server)
        assert (server.models, server.slots) == ((), None)


async def test_a_server_that_does_not_tell(make: Make) -> None:
    async with StandIn() as standin:
        standin.on["/v1/models"] = Reply(no_answer=True)
        server = make(standin.url)
        await health().discover(server)
        assert server.models == ()


async def watch_until(watcher: Health, server: Server, condition: Callable[[], bool]) -> None:
    watching = asyncio.ensure_future(watcher.watch(server, lambda: True))
    try:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("not within 10 s")
    finally:
        watching.cancel()


async def test_a_watched_server_is_asked_when_it_comes_up(make: Make) -> None:
    async with StandIn() as standin:
        server = make(standin.url)
        standin.loading = True
        watcher = health()
        await watch_until(watcher, server, lambda: server.state == "loading")
        assert {request.path for request in standin.requests} == {"/health"}
        waiting = asyncio.ensure_future(watcher.wait_until_up(10))
        standin.loading = False
        await watch_until(watcher, server, lambda: server.models == ("m1",) and server.slots == 4)
        await waiting
        count = len([request for request in standin.requests if request.path == "/v1/models"])
        probes = len(standin.requests)
        await watch_until(watcher, server, lambda: len(standin.requests) > probes + 3)
        assert len([request for request in standin.requests if request.path == "/v1/models"]) <= count + 1


async def test_watching_ends_with_the_server(make: Make) -> None:
    server = make("http://127.0.0.1:1", active=False)
    known = iter([True, True, False])
    await asyncio.wait_for(health().watch(server, lambda: next(known)), 5)
    assert server.state == "disabled"


async def test_without_probes_a_server_is_only_asked_for_its_models(make: Make) -> None:
    async with StandIn(["told"]) as standin:
        server = make(standin.url)
        await watch_until(health(probe_interval=0), server, lambda: server.slots == 4)
        assert server.models == ("told",)
        assert server.state == "unknown"
        assert "/health" not in {request.path for request in standin.requests}


async def test_waiting_for_a_server_ends(make: Make) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await health().wait_until_up(0.01)


async def test_models_that_vanish_stay_for_a_while(make: Make, monkeypatch: Any) -> None:
    server = make("http://127.0.0.1:1")
    assert server.learn(["a", "b"], None)
    assert not server.learn(["a"], None)
    assert set(server.models) == {"a", "b"}
    monkeypatch.setattr("smolproxy.daemon.servers.VANISHED_MODELS_STAY", 0.0)
    assert server.learn(["a"], None)
    assert server.models == ("a",)


def test_failures_are_described_without_an_address() -> None:
    assert describe(asyncio.TimeoutError()) == "timed out"
    assert describe(aiohttp.ServerDisconnectedError()) == "closed the connection without an answer"
    assert describe(aiohttp.ClientPayloadError()) == "ended its answer too early"
    assert describe(ConnectionResetError(104, "Connection reset by peer")) == "Connection reset by peer"
    assert describe(ValueError("odd")) == "ValueError: odd"
    assert describe(ValueError()) == "ValueError"


async def test_a_refused_connection_is_described(make: Make) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        server = make(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        await health().probe(server)
    assert server.last_error is not None
    assert server.last_error.startswith("cannot connect: ")
    assert module._ASK_AGAIN > 1
