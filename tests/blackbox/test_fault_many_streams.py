"""Many streams at once over several servers, one of them stuck: nobody waits for another's server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from smolproxy.standin import Reply, StandIn

from .clients import booked, idle
from .conftest import Site
from .harness import ADMIN_KEY, Daemon, until

EACH = 100


async def quickly(daemon: Daemon, path: str, key: str | None = None, within: float = 1.0) -> Any:
    """Ask smolproxy itself; it must answer soon."""
    started = time.monotonic()
    answer = await daemon.ask("GET", path, key=key)
    assert time.monotonic() - started < within, path
    assert answer.status == 200
    return answer.json


async def test_300_streams_over_3_servers(daemon: Daemon) -> None:
    gate = asyncio.Event()
    key = await daemon.new_key()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(StandIn(["many"], slots=EACH)) for _ in range(3)]
        for server in servers:
            server.default = Reply(hold={3: gate})  # the role, two tokens, and the rest later
        ids = [await daemon.add_server(server, f"many-{at}") for at, server in enumerate(servers)]

        async def one() -> tuple[str, bytes]:
            body = {"model": "many", "messages": [], "max_tokens": 5, "stream": True}
            async with daemon.open("POST", "/v1/chat/completions", key=key, json=body) as response:
                return response.headers["x-request-id"], await response.read()

        streams = [asyncio.ensure_future(one()) for _ in range(3 * EACH)]
        await until(lambda: sum(server.in_flight for server in servers) == 3 * EACH, 30)
        assert [server.in_flight for server in servers] == [EACH] * 3
        assert (await quickly(daemon, "/health"))["active_servers"] >= 3
        shown = {server["id"]: server for server in await quickly(daemon, "/admin/servers", ADMIN_KEY)}
        assert [shown[server_id]["in_flight"] for server_id in ids] == [EACH] * 3
        await quickly(daemon, "/admin/usage", ADMIN_KEY)
        await quickly(daemon, "/v1/models")
        gate.set()
        for request_id, body in await asyncio.gather(*streams):
            assert body.count(b'"content":"') == 5
            assert body.endswith(b"data: [DONE]\n\n")
            row = await booked(daemon, request_id)
            assert (row["outcome"], row["completion_tokens"]) == ("ok", 5)
        await idle(daemon)
        rows = daemon.rows("SELECT server_id FROM usage WHERE real_model_name = 'many'")
        assert Counter(row["server_id"] for row in rows) == dict.fromkeys(ids, EACH)
        for server_id in ids:
            await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_a_stuck_server_does_not_delay_another(site: Site) -> None:
    """One that accepts connections and never says a word, with 150 requests at it, and its own user waiting."""
    daemon = site.daemon
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0, backlog=512)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stuck = (await daemon.admin("POST", "/servers", {"name": "stuck", "url": url, "models": ["stuck"]}))["id"]
        key = await daemon.new_key()
        waiting = [
            asyncio.ensure_future(
                daemon.ask(
                    "POST",
                    "/v1/chat/completions",
                    key=key,
                    json={"model": "stuck", "messages": [], "stream": bool(number % 2)},
                )
            )
            for number in range(150)
        ]
        await until(lambda: len(accepted) >= 150, 30)
        slowest = 0.0
        for number in range(30):
            started = time.monotonic()
            answer = await site.chat(max_tokens=3, stream=bool(number % 2))
            slowest = max(slowest, time.monotonic() - started)
            assert answer.status == 200
        assert slowest < 1.0
        await quickly(daemon, "/health")
        await quickly(daemon, "/admin/servers", ADMIN_KEY)
        await quickly(daemon, "/v1/models")
        assert not any(each.done() for each in waiting)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        await idle(daemon)
    finally:
        server.close()
        for writer in accepted:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in accepted), return_exceptions=True)
    rows = "SELECT outcome FROM usage WHERE real_model_name = 'stuck'"
    await until(lambda: len(daemon.rows(rows)) == 150, 20)
    assert {row["outcome"] for row in daemon.rows(rows)} == {"client_disconnect"}
    await daemon.admin("DELETE", f"/servers/{stuck}")
