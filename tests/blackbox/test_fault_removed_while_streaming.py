"""Fault: a server or a key is removed while it streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from smolproxy.standin import Reply, StandIn

from .clients import idle
from .conftest import Site
from .harness import Daemon, until

_numbers = itertools.count(1)

Remove = Callable[[Site, int], Awaitable[Any]]


@pytest.fixture
async def site(daemon: Daemon) -> AsyncIterator[Site]:
    """A site whose server and key may be gone at its end."""
    number = next(_numbers)
    async with StandIn([f"model-{number}"], notice=0.1) as server:
        server_id = await daemon.add_server(server, f"server-{number}")
        yield Site(daemon, server, f"model-{number}", await daemon.new_key(f"user-{number}"), server_id)


async def key_id(site: Site) -> int:
    keys = await site.daemon.admin("GET", "/keys")
    return next(key["id"] for key in keys if site.key.startswith(key["prefix"]))


async def delete_server(site: Site, _: int) -> None:
    await site.daemon.admin("DELETE", f"/servers/{site.server_id}")


async def remove_server_by_command(site: Site, _: int) -> None:
    await site.daemon.cli("servers", "remove", site.server_id)


async def disable_server(site: Site, _: int) -> None:
    await site.daemon.admin("PATCH", f"/servers/{site.server_id}", {"active": False})


async def remove_model(site: Site, _: int) -> None:
    await site.daemon.admin("DELETE", f"/servers/{site.server_id}/models", {"model_name": site.model})


async def delete_key(site: Site, key: int) -> None:
    await site.daemon.admin("DELETE", f"/keys/{key}")


async def delete_key_by_command(site: Site, key: int) -> None:
    await site.daemon.cli("keys", "delete", key)


async def disable_key(site: Site, key: int) -> None:
    await site.daemon.admin("PATCH", f"/keys/{key}/toggle", {"active": False})


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "plain"])
@pytest.mark.parametrize(
    ("remove", "then"),
    [
        (delete_server, 404),
        (remove_server_by_command, 404),
        (disable_server, 503),
        (remove_model, 404),  # the list is empty now; the server is not asked behind the administrator's back
        (delete_key, 401),
        (delete_key_by_command, 401),
        (disable_key, 401),
    ],
)
async def test_it_ends_normally_and_the_next_one_is_refused(site: Site, remove: Remove, then: int, whole: bool) -> None:
    go = asyncio.Event()
    site.server.script.append(Reply(before=go) if whole else Reply(says=["a", "b", "c", "d"], hold={2: go}))
    key = await key_id(site)
    asking = asyncio.create_task(site.chat(stream=not whole, max_tokens=4))
    await until(lambda: site.server.in_flight)
    await remove(site, key)

    async def status() -> int:
        return (await site.chat(max_tokens=1)).status

    end = asyncio.get_running_loop().time() + 10
    while await status() != then:  # a command's change is noticed within a second
        assert asyncio.get_running_loop().time() < end
    go.set()
    answer = await asking
    assert answer.status == 200
    if not whole:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert "error" not in answer.text
    row = site.daemon.row(answer.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"], row["tokens_source"]) == ("ok", 4, "usage")
    logs = (await site.daemon.admin("GET", f"/usage?key_id={key}"))["logs"]
    told = next(log for log in logs if log["request_id"] == row["request_id"])
    number = site.model.removeprefix("model-")
    assert (told["user_name"], told["server_id"]) == (f"user-{number}", site.server_id)
    assert told["server_name"] == f"server-{number}"
    await idle(site.daemon)
    await site.server.wait_for(lambda: site.server.in_flight == 0)


async def test_a_key_disabled_and_enabled_has_its_places_back(site: Site) -> None:
    key = await key_id(site)
    await site.daemon.admin("PUT", f"/keys/{key}/limits", {"parallel_limit": 1})
    go = asyncio.Event()
    site.server.script.append(Reply(says=["a", "b", "c", "d"], hold={2: go}))
    asking = asyncio.create_task(site.chat(stream=True))
    await until(lambda: site.server.in_flight)
    await disable_key(site, key)
    await site.daemon.admin("PATCH", f"/keys/{key}/toggle", {"active": True})
    assert (await site.chat(max_tokens=1)).status == 429
    go.set()
    assert (await asking).status == 200
    assert (await site.chat(max_tokens=1)).status == 200


async def test_a_server_removed_and_added_again_starts_from_none(site: Site) -> None:
    go = asyncio.Event()
    site.server.script.append(Reply(says=["a", "b", "c", "d"], hold={2: go}))
    asking = asyncio.create_task(site.chat(stream=True))
    await until(lambda: site.server.in_flight)
    await delete_server(site, 0)
    site.server_id = await site.daemon.add_server(site.server, "added again")
    rows = [row for row in await site.daemon.admin("GET", "/servers") if row["id"] == site.server_id]
    assert [row["in_flight"] for row in rows] == [0]
    assert (await site.chat(max_tokens=1)).status == 200
    go.set()
    answer = await asking
    assert answer.text.endswith("data: [DONE]\n\n")
    rows = [row for row in await site.daemon.admin("GET", "/servers") if row["id"] == site.server_id]
    assert [row["in_flight"] for row in rows] == [0]
