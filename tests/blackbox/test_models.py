"""What users see of models and health: names alone, from memory."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import quote

import pytest

from smolproxy.standin import Reply, StandIn

from .conftest import Site
from .harness import ADMIN_KEY, Daemon

NAMES = [
    "org/model:q4",
    "a b  c",
    "100%",
    "%2F%20%25",
    "a//b/",
    "ünïcode-日本語-🚀",
    "q?x=1#y&z+1",
    'quo"te\\back',
    "m" * 300,
    "../etc",
    "x/toggle",
]
"""Names that a path or a query could be confused by."""


def ids(listed: dict) -> list[str]:
    assert listed["object"] == "list"
    return [model["id"] for model in listed["data"]]


async def test_the_list_has_models_and_aliases_and_nothing_of_servers(site: Site) -> None:
    await site.daemon.admin("POST", "/aliases", {"alias_name": "quick", "real_model_name": site.model})
    answer = await site.daemon.ask("GET", "/v1/models")
    assert sorted(ids(answer.json)) == sorted([site.model, "quick"])
    for model in answer.json["data"]:
        assert set(model) == {"id", "object", "created", "owned_by"}
        assert model["object"] == "model"
        assert abs(model["created"] - time.time()) < 600
    assert "http" not in answer.text
    assert "server-" not in answer.text
    one = await site.daemon.ask("GET", "/v1/models/quick")
    assert one.json in answer.json["data"]
    await site.daemon.admin("DELETE", "/aliases/quick")
    assert ids((await site.daemon.ask("GET", "/v1/models")).json) == [site.model]


async def test_an_unknown_model(daemon: Daemon) -> None:
    answer = await daemon.ask("GET", "/v1/models/no/such:model")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "no/such:model" in answer.message


async def until_status(site: Site, status: int, **fields: Any) -> None:
    """Ask until the answer has a status, which a change by command must bring within a second."""
    end = time.monotonic() + 1.0
    while (answer := await site.chat(**fields)).status != status:
        assert time.monotonic() < end, answer
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_any_name_is_created_shown_routed_and_deleted(daemon: Daemon, site: Site, name: str) -> None:
    for spelled in (quote(name, safe=""), quote(name)):
        await daemon.admin("POST", f"/servers/{site.server_id}/models", {"model_name": name})
        (shown,) = [each for each in await daemon.admin("GET", "/servers") if each["id"] == site.server_id]
        assert name in shown["models"]
        assert name in ids((await daemon.ask("GET", "/v1/models")).json)
        assert (await daemon.ask("GET", f"/v1/models/{spelled}")).json["id"] == name
        answer = await site.chat(model=name)
        assert answer.status == 200
        assert site.generating()[-1].json["model"] == name
        assert daemon.row(answer.headers["x-request-id"])["model_name"] == name
        await daemon.admin("DELETE", f"/servers/{site.server_id}/models/{spelled}")
        assert name not in ids((await daemon.ask("GET", "/v1/models")).json)
    await daemon.admin("POST", f"/servers/{site.server_id}/models", {"model_name": name})
    await daemon.admin("DELETE", f"/servers/{site.server_id}/models", {"model_name": name})
    assert name not in ids((await daemon.ask("GET", "/v1/models")).json)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_any_name_can_be_an_alias(daemon: Daemon, site: Site, name: str) -> None:
    await daemon.admin("POST", "/aliases", {"alias_name": name, "real_model_name": site.model})
    assert {"alias_name": name, "real_model_name": site.model} in await daemon.admin("GET", "/aliases")
    answer = await site.chat(model=name)
    assert answer.status == 200
    assert site.generating()[-1].json["model"] == site.model
    row = daemon.row(answer.headers["x-request-id"])
    assert (row["model_name"], row["real_model_name"]) == (name, site.model)
    spelled = quote(name, safe="")
    await daemon.admin("PATCH", f"/aliases/{spelled}", {"real_model_name": site.model})
    await daemon.admin("DELETE", f"/aliases/{spelled}")
    assert name not in ids((await daemon.ask("GET", "/v1/models")).json)


async def test_names_by_command(daemon: Daemon, site: Site) -> None:
    name = "org/ünï code:q4 100%" + "m" * 280
    alias = f"alias of {name}"[:300]
    await daemon.cli("servers", "add-model", site.server_id, name)
    await daemon.cli("aliases", "set", alias, name)
    await until_status(site, 200, model=alias)
    assert name in json.loads((await daemon.cli("servers", "list", "--json")).out)[0]["models"]
    assert json.loads((await daemon.cli("aliases", "list", "--json")).out)[0]["alias_name"] == alias
    await daemon.cli("aliases", "remove", alias)
    await daemon.cli("servers", "remove-model", site.server_id, name)
    await until_status(site, 404, model=name)


async def test_a_wrong_key_is_refused_where_none_is_needed(daemon: Daemon) -> None:
    for path in ("/v1/models", "/v1/models/x", "/health"):
        for headers in ({"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await daemon.ask("GET", path, headers=headers)
            assert (answer.status, answer.code) == (401, "invalid_api_key"), path
            assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_a_key_sees_only_what_it_may_use(daemon: Daemon, site: Site) -> None:
    await daemon.admin("POST", f"/servers/{site.server_id}/models", {"model_name": "secret/model"})
    key = await daemon.new_key("narrow", models=["secret/*"])
    assert ids((await daemon.ask("GET", "/v1/models", key=key)).json) == ["secret/model"]
    assert (await daemon.ask("GET", f"/v1/models/{site.model}", key=key)).status == 404
    assert (await daemon.ask("GET", "/v1/models/secret/model", key=key)).status == 200
    assert len(ids((await daemon.ask("GET", "/v1/models", key=site.key)).json)) == 2


async def test_a_disabled_servers_models_are_not_listed(daemon: Daemon, site: Site) -> None:
    await daemon.admin("PATCH", f"/servers/{site.server_id}", {"active": False})
    assert site.model not in ids((await daemon.ask("GET", "/v1/models")).json)
    await daemon.admin("PATCH", f"/servers/{site.server_id}", {"active": True})
    assert site.model in ids((await daemon.ask("GET", "/v1/models")).json)


async def test_models_need_a_key_if_so_set(make_daemon) -> None:
    daemon = make_daemon(settings={"models_require_key": True}).start()
    for path in ("/v1/models", "/models", "/v1/models/x"):
        answer = await daemon.ask("GET", path)
        assert (answer.status, answer.code) == (401, "invalid_api_key")
    key = await daemon.new_key()
    assert (await daemon.ask("GET", "/v1/models", key=key)).json["data"] == []
    assert (await daemon.ask("GET", "/v1/models", key=ADMIN_KEY)).status == 401
    assert (await daemon.ask("GET", "/health")).status == 200


async def test_health_and_models_wait_for_no_server(daemon: Daemon) -> None:
    async with StandIn(["stuck"]) as server:
        for path in ("/health", "/v1/models", "/props"):
            server.on[path] = Reply(before=60.0)
        server_id = await daemon.add_server(server, "stuck")
        for path in ("/health", "/v1/models", "/health"):
            started = time.monotonic()
            answer = await daemon.ask("GET", path)
            assert answer.status == 200
            assert time.monotonic() - started < 1.0
        assert (await daemon.ask("GET", "/health")).json == {"status": "ok", "active_servers": 1}
        await daemon.admin("PATCH", f"/servers/{server_id}", {"active": False})
        assert (await daemon.ask("GET", "/health")).json == {"status": "ok", "active_servers": 0}
        await daemon.admin("DELETE", f"/servers/{server_id}")


async def test_a_server_without_listed_models_is_asked_for_them(daemon: Daemon) -> None:
    async with StandIn(["discovered/one", "two"], slots=3) as server:
        server_id = await daemon.add_server(server, "asked", models=[])
        end = time.monotonic() + 10
        while "two" not in ids((await daemon.ask("GET", "/v1/models")).json):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        (shown,) = [each for each in await daemon.admin("GET", "/servers") if each["id"] == server_id]
        assert shown["models"] == ["discovered/one", "two"]
        while shown["slots"] is None:
            (shown,) = [each for each in await daemon.admin("GET", "/servers") if each["id"] == server_id]
            assert time.monotonic() < end
        assert (shown["slots"], shown["state"]) == (3, "up")
        taken = {"alias_name": "two", "real_model_name": "discovered/one"}
        await daemon.admin("POST", "/aliases", taken, status=409)
        await daemon.admin("DELETE", f"/servers/{server_id}")
    assert "two" not in ids((await daemon.ask("GET", "/v1/models")).json)
