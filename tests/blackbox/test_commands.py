"""What a command changes is in force in a running daemon within one second, and streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from smolproxy.standin import StandIn

from .conftest import Site
from .harness import Daemon

WITHIN = 1.0
"""Seconds after the end of a command."""


async def soon(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Ask until the wanted answer comes, which must be within a second."""
    end = time.monotonic() + WITHIN
    while (answer := await ask()) != wanted:
        assert time.monotonic() < end, answer
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_stream(site: Site) -> AsyncIterator[None]:
    """A stream that runs meanwhile; at the end it must be whole."""
    site.server.default.delay = 0.01
    async with site.open(max_tokens=2000) as response:
        await response.content.readany()
        yield
        assert site.server.in_flight == 1  # it has run all the while
        site.server.default.delay = 0.0
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    row = site.daemon.row(response.headers["x-request-id"])
    assert (row["outcome"], row["completion_tokens"]) == ("ok", 2000)


async def test_a_key_made_disabled_enabled_rotated_and_deleted(daemon: Daemon, site: Site) -> None:
    made = json.loads((await daemon.cli("keys", "create", "cli", "--json")).out)
    secret = made["key"]

    async def status() -> int:
        body = site.body(max_tokens=1)
        return (await daemon.ask("POST", "/v1/chat/completions", key=secret, json=body)).status

    async with running_stream(site):
        await soon(status, 200)
        await daemon.cli("keys", "disable", made["id"])
        await soon(status, 401)
        await daemon.cli("keys", "enable", made["id"])
        await soon(status, 200)
        rotated = (await daemon.cli("keys", "rotate", made["id"])).out.strip()
        await soon(status, 401)
        secret = rotated
        await soon(status, 200)
        await daemon.cli("keys", "delete", made["id"])
        await soon(status, 401)


async def test_the_streaming_key_itself_disabled(daemon: Daemon, site: Site) -> None:
    (row,) = [row for row in await daemon.admin("GET", "/keys") if site.key.startswith(row["prefix"])]
    async with running_stream(site):
        await daemon.cli("keys", "disable", row["id"])

        async def status() -> int:
            return (await site.chat()).status

        await soon(status, 401)


async def test_servers_and_aliases(daemon: Daemon, site: Site) -> None:
    async with StandIn(["by-command"]) as server, running_stream(site):

        async def status(model: str) -> int:
            return (await site.chat(model=model, max_tokens=1)).status

        await daemon.cli("servers", "add", "cli", server.url, "--model", "by-command")
        await soon(lambda: status("by-command"), 200)
        (server_id,) = [row["id"] for row in await daemon.admin("GET", "/servers") if row["name"] == "cli"]
        await daemon.cli("servers", "disable", server_id)
        await soon(lambda: status("by-command"), 503)
        await daemon.cli("servers", "enable", server_id)
        await soon(lambda: status("by-command"), 200)
        await daemon.cli("aliases", "set", "by-alias", "by-command")
        await soon(lambda: status("by-alias"), 200)
        await daemon.cli("aliases", "remove", "by-alias")
        await soon(lambda: status("by-alias"), 404)
        await daemon.cli("servers", "add-model", server_id, "second")
        await soon(lambda: status("second"), 200)
        await daemon.cli("servers", "remove", server_id)
        await soon(lambda: status("by-command"), 404)


async def test_limits_by_command(daemon: Daemon, site: Site) -> None:
    made = json.loads((await daemon.cli("keys", "create", "limited", "--json")).out)

    async def status() -> int:
        body = site.body(max_tokens=1)
        return (await daemon.ask("POST", "/v1/chat/completions", key=made["key"], json=body)).status

    await soon(status, 200)
    await daemon.cli("keys", "limits", made["id"], "--rpm", 0)
    await soon(status, 429)
    await daemon.cli("keys", "limits", made["id"], "--rpm", "none")
    await soon(status, 200)


async def test_a_command_finds_the_daemons_servers_up(daemon: Daemon, site: Site) -> None:
    checked = await daemon.cli("servers", "check")
    assert "up" in checked.out
    await site.server.stop()
    checked = await daemon.cli("servers", "check", code=1)
    assert "down" in checked.out


async def test_a_command_works_without_a_daemon_and_finds_its_books(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    key = (await daemon.cli("keys", "create", "ann")).out.strip()
    async with StandIn(["m"]) as server:
        await daemon.cli("servers", "add", "one", server.url, "--model", "m")
        daemon.start()
        answer = await daemon.ask("POST", "/v1/chat/completions", key=key, json={"model": "m", "messages": []})
        assert answer.status == 200
    assert daemon.stop() == 0
    printed = json.loads((await daemon.cli("usage", "--json")).out)
    assert printed["logs"][0]["request_id"] == answer.headers["x-request-id"]
