"""The routes: which there are, and that none of the admin tree answers without the admin key."""

from __future__ import annotations

import re

import pytest
from aiohttp import web

from smolproxy.core.endpoints import ENDPOINTS
from smolproxy.store import keys

from .conftest import ADMIN_KEY

ADMIN = {
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("DELETE", "/admin/keys/{id}"),
    ("PATCH", "/admin/keys/{id}/toggle"),
    ("PUT", "/admin/keys/{id}/limits"),
    ("GET", "/admin/servers"),
    ("POST", "/admin/servers"),
    ("PATCH", "/admin/servers/{id}"),
    ("DELETE", "/admin/servers/{id}"),
    ("POST", "/admin/servers/{id}/models"),
    ("DELETE", "/admin/servers/{id}/models"),
    ("DELETE", "/admin/servers/{id}/models/{model}"),
    ("GET", "/admin/aliases"),
    ("POST", "/admin/aliases"),
    ("PATCH", "/admin/aliases/{alias}"),
    ("DELETE", "/admin/aliases/{alias}"),
    ("GET", "/admin/usage"),
    ("GET", "/admin/usage/summary/real"),
}
PUBLIC = {
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/v1/models/{id}"),
    ("GET", "/models/{id}"),
    ("GET", "/health"),
}


def walk(application: web.Application) -> set[tuple[str, str]]:
    """Methods and paths of all routes; of HEAD, that of GET stands for it."""
    return {
        (route.method, route.resource.canonical)
        for route in application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def test_the_routes_are_those_of_the_contract(run_app) -> None:
    _, client = await run_app()
    forwarded = {("POST", path) for endpoint in ENDPOINTS for path in (endpoint.path, *endpoint.spellings)}
    assert walk(client.app) == ADMIN | PUBLIC | forwarded


async def test_no_admin_route_without_the_admin_key(run_app) -> None:
    daemon, client = await run_app()
    _, user = await keys.create(daemon.database, "user")
    seen = set()
    for method, canonical in walk(client.app):
        if not canonical.startswith("/admin"):
            continue
        path = re.sub(r"\{[^}]*\}", "1", canonical)
        for key, status in ((None, 401), ("wrong", 401), (ADMIN_KEY[:-1], 401), (user, 403)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with client.request(method, path, headers=headers) as response:
                assert response.status == status, (method, path, key)
                assert (await response.json())["error"]["code"] == ("forbidden" if status == 403 else "invalid_api_key")
        seen.add((method, canonical))
    assert seen == ADMIN


async def test_no_admin_route_at_all_if_so_started(run_app) -> None:
    _, client = await run_app(admin_api=False)
    assert not [path for _, path in walk(client.app) if "admin" in path]
    for method, canonical in ADMIN:
        async with client.request(method, re.sub(r"\{[^}]*\}", "1", canonical)) as response:
            assert response.status == 404


async def test_paths_of_the_tree_without_a_route_give_nothing_away(run_app) -> None:
    _, client = await run_app()
    for path in ("/admin", "/admin/", "/admin/x/y", "/admin/keys/1", "/admin/usage/"):
        async with client.get(path) as response:
            assert response.status == 401


@pytest.mark.parametrize("spelling", ["bearer", "BEARER", "Bearer"])
async def test_the_admin_key_opens_every_get(run_app, spelling: str) -> None:
    _, client = await run_app()
    for method, path in ADMIN:
        if method == "GET":
            async with client.get(path, headers={"Authorization": f"{spelling} {ADMIN_KEY}"}) as response:
                assert response.status == 200
