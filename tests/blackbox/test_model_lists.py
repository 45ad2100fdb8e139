"""Servers that are asked for their models and servers whose models are listed: what changes from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from smolproxy.standin import StandIn

from .harness import ADMIN_KEY, Daemon, until

CHAT = "/v1/chat/completions"


@pytest.fixture
async def asked(make_daemon: Callable[..., Daemon]) -> AsyncIterator[tuple[Daemon, StandIn, str]]:
    """A daemon with one server that is asked itself and has the models `m` and `n`."""
    daemon = make_daemon().start()
    async with StandIn(["m", "n"]) as server:
        await daemon.admin("POST", "/servers", {"name": "one", "url": server.url})
        await until(lambda: daemon.logged("models of a server changed"))
        yield daemon, server, await daemon.new_key()


async def models(daemon: Daemon) -> list[str]:
    return [model["id"] for model in (await daemon.ask("GET", "/v1/models")).json["data"]]


async def listed(daemon: Daemon, server_id: int = 1) -> list[str]:
    (row,) = [row for row in await daemon.admin("GET", "/servers") if row["id"] == server_id]
    found: list[str] = row["models"]
    return found


async def test_a_model_added_to_a_server_that_is_asked_takes_no_other_away(asked: Any) -> None:
    daemon, _, _ = asked
    await daemon.admin("POST", "/servers/1/models", {"model_name": "third"})
    assert await models(daemon) == ["m", "n", "third"]


async def test_a_model_that_a_server_told_itself_cannot_be_added_twice(asked: Any) -> None:
    daemon, _, _ = asked
    answer = await daemon.admin("POST", "/servers/1/models", {"model_name": "m"}, status=409)
    assert answer["error"]["code"] == "conflict"


async def test_a_list_whose_last_model_was_removed_stays_empty(asked: Any) -> None:
    daemon, _, key = asked
    await daemon.admin("PATCH", "/servers/1", {"models": ["m"]})
    await daemon.admin("DELETE", "/servers/1/models/m")
    assert await listed(daemon) == []
    answer = await daemon.ask("POST", CHAT, key=key, json={"model": "m", "messages": []})
    assert (answer.status, answer.code) == (404, "model_not_found")
    await daemon.admin("PATCH", "/servers/1", {"models": []})  # an empty list: ask again
    assert await listed(daemon) == ["m", "n"]


async def test_reassigning_takes_a_model_from_a_server_that_is_asked(asked: Any) -> None:
    daemon, _, key = asked
    async with StandIn(["m"]) as other:
        await daemon.admin("POST", "/servers", {"name": "two", "url": other.url, "models": ["x"]})
        await daemon.admin("POST", "/servers/2/models?reassign=true", {"model_name": "m"})
        assert (await listed(daemon, 1), await listed(daemon, 2)) == (["n"], ["x", "m"])
        for _ in range(4):
            assert (await daemon.ask("POST", CHAT, key=key, json={"model": "m", "messages": []})).status == 200
        assert sum(request.path == CHAT for request in other.requests) == 4


@pytest.mark.parametrize("change", [{"api_key": "other"}, {"url": "localhost"}])
async def test_a_server_whose_address_or_key_changes_keeps_its_models(asked: Any, change: dict[str, str]) -> None:
    daemon, server, key = asked
    if "url" in change:
        change = {"url": server.url.replace("127.0.0.1", "localhost")}
    await daemon.admin("PATCH", "/servers/1", change)
    answer = await daemon.ask("POST", CHAT, key=key, json={"model": "m", "messages": []})
    assert answer.status == 200


async def test_the_log_tells_why_a_request_was_refused(asked: Any) -> None:
    daemon, _, key = asked
    await daemon.ask("POST", CHAT, key=key, json={"model": "no such", "messages": []})
    (line,) = await until(lambda: daemon.logged("request", status=404))
    assert (line["code"], line["model"]) == ("model_not_found", "no such")


async def test_the_admin_key_is_taken_as_a_bearer_token_only(asked: Any) -> None:
    daemon, _, _ = asked
    answer = await daemon.ask("GET", "/admin/keys", headers={"x-api-key": ADMIN_KEY})
    assert (answer.status, answer.code) == (401, "invalid_api_key")


async def test_an_id_is_written_in_one_way(asked: Any) -> None:
    daemon, _, _ = asked
    await daemon.admin("DELETE", "/keys/01", status=404)
    assert len(await daemon.admin("GET", "/keys")) == 1


async def test_a_path_that_a_server_tells_shows_to_nobody(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    async with StandIn(["/srv/models/small.gguf"]) as server:
        await daemon.admin("POST", "/servers", {"name": "one", "url": server.url})
        await until(lambda: daemon.logged("models of a server changed"))
        assert await models(daemon) == ["small.gguf"]
        key = await daemon.new_key()
        answer = await daemon.ask("POST", CHAT, key=key, json={"model": "small.gguf", "messages": []})
        assert answer.status == 200
        assert (await daemon.cli("servers", "check")).out.split()[-3] == "small.gguf"
