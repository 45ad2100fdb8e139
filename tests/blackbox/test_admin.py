"""The admin API: each endpoint's good and bad requests; what it changes is in force with the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smolproxy.standin import StandIn

from .conftest import Site
from .harness import ADMIN_KEY, Daemon

ROUTES = [
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("DELETE", "/admin/keys/1"),
    ("PATCH", "/admin/keys/1/toggle"),
    ("PUT", "/admin/keys/1/limits"),
    ("GET", "/admin/servers"),
    ("POST", "/admin/servers"),
    ("PATCH", "/admin/servers/1"),
    ("DELETE", "/admin/servers/1"),
    ("POST", "/admin/servers/1/models"),
    ("DELETE", "/admin/servers/1/models"),
    ("DELETE", "/admin/servers/1/models/a/b"),
    ("GET", "/admin/aliases"),
    ("POST", "/admin/aliases"),
    ("PATCH", "/admin/aliases/a"),
    ("DELETE", "/admin/aliases/a"),
    ("GET", "/admin/usage"),
    ("GET", "/admin/usage/summary/real"),
]
ODD = [
    ("GET", "/admin"),
    ("GET", "/admin/"),
    ("GET", "//admin/keys"),
    ("GET", "/admin//keys"),
    ("GET", "/admin/keys/"),
    ("GET", "/%61dmin/keys"),
    ("GET", "/admin/nothing"),
    ("TRACE", "/admin/keys"),
    ("PUT", "/admin/keys"),
    ("HEAD", "/admin/usage"),
    ("OPTIONS", "/admin/servers"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES + ODD)
async def test_nothing_answers_without_the_admin_key(daemon: Daemon, method: str, path: str) -> None:
    user = await daemon.new_key("user")
    for headers in ({}, {"Authorization": f"Bearer {ADMIN_KEY}x"}, {"Authorization": ADMIN_KEY}, {"x-api-key": "x"}):
        answer = await daemon.ask(method, path, headers=headers)
        assert answer.status == 401, (headers, answer)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert method == "HEAD" or answer.code == "invalid_api_key"
    answer = await daemon.ask(method, path, key=user)
    assert answer.status == 403
    assert method == "HEAD" or answer.code == "forbidden"


async def test_the_admin_key_opens_it_in_any_case_of_the_scheme(daemon: Daemon) -> None:
    for headers in ({"Authorization": f"bearer {ADMIN_KEY}"}, {"authorization": f"BEARER {ADMIN_KEY}"}):
        assert (await daemon.ask("GET", "/admin/keys", headers=headers)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/admin", 404),
        ("GET", "/admin/nothing", 404),
        ("PUT", "/admin/keys", 405),
        ("GET", "/admin/keys/1/toggle", 405),
        ("POST", "/admin/usage", 405),
        ("GET", "/admin/keys/", 200),
        ("GET", "//admin//keys", 200),
    ],
)
async def test_paths_and_methods_for_the_admin(daemon: Daemon, method: str, path: str, status: int) -> None:
    answer = await daemon.ask(method, path, key=ADMIN_KEY)
    assert answer.status == status, answer
    assert status == 200 or answer.code in ("not_found", "method_not_allowed")


@pytest.mark.parametrize(("method", "path"), ROUTES + ODD)
async def test_there_is_no_admin_api_if_so_started(no_admin: Daemon, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": f"Bearer {ADMIN_KEY}"}):
        answer = await no_admin.ask(method, path, headers=headers)
        assert answer.status == 404
        assert method == "HEAD" or answer.code == "not_found"


@pytest.fixture(scope="module")
def no_admin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A daemon without an admin API; it needs no ADMIN_KEY, and one that is there opens nothing."""
    daemon = Daemon(tmp_path_factory.mktemp("no-admin"), arguments=["--no-admin-api"]).start()
    yield daemon
    daemon.stop()


async def test_keys(daemon: Daemon, site: Site) -> None:
    made = await daemon.admin("POST", "/keys", {"name": "Ann Ünïcode"})
    assert set(made) == {"ok", "id", "key", "name"}
    assert (made["ok"], made["name"]) == (True, "Ann Ünïcode")
    listed = await daemon.admin("GET", "/keys")
    (row,) = [row for row in listed if row["id"] == made["id"]]
    assert {"id", "name", "prefix", "active", "created_at"} < set(row)
    assert made["key"].startswith(row["prefix"])
    assert row["active"] is True
    assert made["key"] not in json.dumps(listed)
    chat = {"json": site.body(), "key": made["key"]}
    assert (await daemon.ask("POST", "/v1/chat/completions", **chat)).status == 200

    toggled = await daemon.admin("PATCH", f"/keys/{made['id']}/toggle")
    assert (toggled["active"], toggled["id"]) == (False, made["id"])
    assert (await daemon.ask("POST", "/v1/chat/completions", **chat)).status == 401
    assert (await daemon.admin("PATCH", f"/keys/{made['id']}/toggle", {"active": False}))["active"] is False
    assert (await daemon.admin("PATCH", f"/keys/{made['id']}/toggle", {"active": True}))["active"] is True
    assert (await daemon.ask("POST", "/v1/chat/completions", **chat)).status == 200

    assert (await daemon.admin("DELETE", f"/keys/{made['id']}"))["ok"] is True
    assert (await daemon.ask("POST", "/v1/chat/completions", **chat)).status == 401
    await daemon.admin("DELETE", f"/keys/{made['id']}", status=404)
    assert made["id"] not in [row["id"] for row in await daemon.admin("GET", "/keys")]
    usage = await daemon.admin("GET", f"/usage?key_id={made['id']}")
    assert {row["user_name"] for row in usage["logs"]} == {"Ann Ünïcode"}
    assert len(usage["logs"]) == 2


async def test_a_key_without_a_name(daemon: Daemon) -> None:
    assert (await daemon.admin("POST", "/keys"))["name"] == "unnamed"
    assert (await daemon.admin("POST", "/keys", {}))["name"] == "unnamed"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/keys", {"name": 5}, 400),
        ("POST", "/keys", {"name": ""}, 400),
        ("POST", "/keys", {"name": "x" * 301}, 400),
        ("POST", "/keys", {"name": "a\nb"}, 400),
        ("POST", "/keys", {"nom": "x"}, 400),
        ("POST", "/keys", [], 400),
        ("PATCH", "/keys/1/toggle", {"active": 1}, 400),
        ("PATCH", "/keys/1/toggle", {"on": True}, 400),
        ("PATCH", "/keys/99999/toggle", None, 404),
        ("PATCH", "/keys/x/toggle", None, 404),
        ("DELETE", "/keys/0", None, 404),
        ("DELETE", "/keys/-1", None, 404),
        ("DELETE", "/keys/99999999999999999999999", None, 404),
        ("PUT", "/keys/99999/limits", {"rpm_limit": 1}, 404),
        ("PUT", "/keys/1/limits", {"rpm": 1}, 400),
        ("PUT", "/keys/1/limits", {"rpm_limit": -1}, 400),
        ("PUT", "/keys/1/limits", {"rpm_limit": 1.5}, 400),
        ("PUT", "/keys/1/limits", {"rpm_limit": "1"}, 400),
        ("PUT", "/keys/1/limits", {"rpm_limit": True}, 400),
        ("PUT", "/keys/1/limits", {"rpm_limit": 2**64}, 400),
        ("PUT", "/keys/1/limits", {"budget_period": "year"}, 400),
        ("PUT", "/keys/1/limits", {"models": "m1"}, 400),
        ("PUT", "/keys/1/limits", {"models": [1]}, 400),
        ("PUT", "/keys/1/limits", {"expires_at": "yesterday"}, 400),
        ("PUT", "/keys/1/limits", {"expires_at": "2001-01-01"}, 400),
        ("PUT", "/keys/1/limits", {"priority": 0}, 400),
        ("POST", "/servers", {"name": "x"}, 400),
        ("POST", "/servers", {"url": "http://127.0.0.1:1"}, 400),
        ("POST", "/servers", {"name": "x", "url": "127.0.0.1:8080"}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://user:secret-canary@127.0.0.1"}, 400),
        ("POST", "/servers", {"name": "x", "url": "ftp://127.0.0.1"}, 400),
        ("POST", "/servers", {"name": "x", "url": ""}, 400),
        ("POST", "/servers", {"name": "", "url": "http://127.0.0.1:1"}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "models": "m"}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "models": [1]}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "models": [""]}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "slots": 0}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "slots": "4"}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "api_key": 5}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "api_key": "a\nb"}, 400),
        ("POST", "/servers", {"name": "x", "url": "http://127.0.0.1:1", "color": "red"}, 400),
        ("PATCH", "/servers/99999", {"name": "y"}, 404),
        ("DELETE", "/servers/99999", None, 404),
        ("DELETE", "/servers/99999/models", {"model_name": "m"}, 404),
        ("POST", "/servers/99999/models", {"model_name": "m"}, 404),
        ("POST", "/aliases", {"alias_name": "a"}, 400),
        ("POST", "/aliases", {"real_model_name": "a"}, 400),
        ("POST", "/aliases", {"alias_name": 1, "real_model_name": "a"}, 400),
        ("POST", "/aliases", {"alias_name": "a", "real_model_name": "a"}, 400),
        ("PATCH", "/aliases/nobody", {"real_model_name": "m"}, 404),
        ("DELETE", "/aliases/nobody", None, 404),
        ("GET", "/usage?limit=many", None, 400),
        ("GET", "/usage?offset=-1", None, 400),
        ("GET", "/usage?key_id=x", None, 400),
        ("GET", "/usage?start_date=yesterday", None, 400),
        ("GET", "/usage?color=red", None, 400),
    ],
    ids=str,
)
async def test_what_an_admin_gets_wrong(daemon: Daemon, method: str, path: str, body: Any, status: int) -> None:
    if path.startswith("/keys/1/"):
        path = path.replace("/1/", f"/{(await daemon.admin('POST', '/keys'))['id']}/")
    before = [await daemon.admin("GET", f"/{what}") for what in ("keys", "servers", "aliases")]
    options = {} if body is None else {"json": body}
    answer = await daemon.ask(method, f"/admin{path}", key=ADMIN_KEY, **options)
    assert answer.status == status, answer
    error = answer.json["error"]
    assert error["code"] in ("invalid_request", "invalid_json", "not_found")
    assert len(error["message"]) > 10
    assert "secret-canary" not in answer.text + daemon.log_text()
    assert [await daemon.admin("GET", f"/{what}") for what in ("keys", "servers", "aliases")] == before


@pytest.mark.parametrize("body", [b"{", b"nonsense", b"[]", b'"x"', b"\xff"], ids=repr)
async def test_bodies_that_are_no_json_object(daemon: Daemon, site: Site, body: bytes) -> None:
    for method, path in (
        ("POST", "/keys"),
        ("POST", "/servers"),
        ("POST", "/aliases"),
        ("PATCH", f"/servers/{site.server_id}"),
        ("POST", f"/servers/{site.server_id}/models"),
    ):
        answer = await daemon.ask(method, f"/admin{path}", key=ADMIN_KEY, data=body)
        assert (answer.status, answer.code) == (400, "invalid_json")


async def test_bodies_are_json_whatever_their_content_type(daemon: Daemon) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await daemon.ask("POST", "/admin/keys", key=ADMIN_KEY, data=b'{"name": "curl"}', headers=headers)
    assert (answer.status, answer.json["name"]) == (200, "curl")


async def test_limits_are_set_cleared_and_left(daemon: Daemon) -> None:
    key_id = (await daemon.admin("POST", "/keys", {"name": "limited"}))["id"]
    path = f"/keys/{key_id}/limits"
    (row,) = [row for row in await daemon.admin("GET", "/keys") if row["id"] == key_id]
    names = (
        "rpm_limit",
        "tpm_limit",
        "parallel_limit",
        "budget",
        "budget_period",
        "models",
        "expires_at",
        "max_tokens",
    )
    assert {name: row[name] for name in (*names, "priority")} == dict.fromkeys((*names, "priority"))
    given = {
        "rpm_limit": 10,
        "tpm_limit": 1000,
        "parallel_limit": 2,
        "budget": 5000,
        "budget_period": "week",
        "models": ["a", "b/*"],
        "expires_at": "2031-05-06T07:08:09Z",
        "max_tokens": 100,
        "priority": 3,
    }
    assert {name: row[name] for name in given} == dict.fromkeys(given)
    row = await daemon.admin("PUT", path, given)
    assert {name: row[name] for name in given} == given
    row = await daemon.admin("PUT", path, {"rpm_limit": None, "max_tokens": 0})
    assert {name: row[name] for name in given} == {**given, "rpm_limit": None, "max_tokens": 0}
    (listed,) = [row for row in await daemon.admin("GET", "/keys") if row["id"] == key_id]
    assert {**listed, "ok": True} == row
    assert (await daemon.admin("PUT", path, {}))["budget"] == 5000
    row = await daemon.admin("PUT", path, dict.fromkeys(given))
    assert {name: row[name] for name in given} == dict.fromkeys(given)


async def test_servers(daemon: Daemon) -> None:
    async with StandIn(["here", "there"], slots=2) as server:
        given = {"name": "büro", "url": server.url + "/v1/", "api_key": "canary-key", "models": ["here"], "slots": 3}
        added = await daemon.admin("POST", "/servers", given)
        assert set(added) == {"ok", "id"}
        path = f"/servers/{added['id']}"

        async def shown() -> dict[str, Any]:
            listed = await daemon.admin("GET", "/servers")
            assert "canary-key" not in json.dumps(listed)
            (row,) = [row for row in listed if row["id"] == added["id"]]
            assert set(row) == {
                *("id", "name", "url", "active", "models", "has_api_key", "state"),
                *("slots", "in_flight", "last_error", "since"),
            }
            assert row["state"] in ("up", "busy", "loading", "down", "wrong_key", "unknown", "disabled")
            return row

        row = await shown()
        assert (row["name"], row["url"], row["models"], row["slots"]) == ("büro", server.url, ["here"], 3)
        assert (row["active"], row["has_api_key"], row["in_flight"]) == (True, True, 0)
        taken = await daemon.admin("POST", "/servers", {"name": "büro", "url": "http://127.0.0.1:1"}, status=409)
        assert taken["error"]["code"] == "conflict"

        key = await daemon.new_key("for servers")

        async def chat(model: str) -> int:
            body = {"model": model, "messages": []}
            return (await daemon.ask("POST", "/v1/chat/completions", key=key, json=body)).status

        assert (await chat("here"), await chat("there")) == (200, 404)
        changed = await daemon.admin("PATCH", path, {"models": ["there"], "slots": None, "api_key": None})
        assert (changed["ok"], changed["models"], changed["has_api_key"]) == (True, ["there"], False)
        assert (await chat("here"), await chat("there")) == (404, 200)
        await daemon.admin("PATCH", path, {"active": False})
        assert (await shown())["state"] == "disabled"
        assert await chat("there") == 503
        await daemon.admin("PATCH", path, {"active": True, "name": "renamed"})
        assert (await chat("there"), (await shown())["name"]) == (200, "renamed")
        for bad in ({}, {"color": "red"}, {"active": 1}, {"active": None}, {"name": None}, {"url": "nowhere"}):
            answer = await daemon.admin("PATCH", path, bad, status=400)
            assert answer["error"]["message"]
        assert (await shown())["name"] == "renamed"

        await daemon.admin("DELETE", path)
        assert await chat("there") == 404
        await daemon.admin("DELETE", path, status=404)
        logs = (await daemon.admin("GET", f"/usage?server_id={added['id']}"))["logs"]
        assert {row["server_name"] for row in logs} == {"renamed"}


async def test_a_server_moved_to_another_url_is_used_at_once_and_a_stream_goes_on(daemon: Daemon, site: Site) -> None:
    async with StandIn([site.model]) as other:
        site.server.default.delay = 0.02
        async with site.open(max_tokens=30) as response:
            await response.content.readany()
            await daemon.admin("PATCH", f"/servers/{site.server_id}", {"url": other.url})
            assert (await site.chat(max_tokens=2)).status == 200
            assert len([request for request in other.requests if request.method == "POST"]) == 1
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
    assert site.server.closed_early == 0


async def test_models_of_a_server(daemon: Daemon, site: Site) -> None:
    async with StandIn(["elsewhere"]) as server:
        other = await daemon.add_server(server, "elsewhere")
        path = f"/servers/{site.server_id}/models"
        assert (await daemon.admin("POST", path, {"model_name": "org/new:1"}))["ok"] is True
        await daemon.admin("POST", path, {"model_name": "org/new:1"}, status=409)
        assert (await site.chat(model="org/new:1")).status == 200
        for bad in ({}, {"model_name": ""}, {"model_name": 1}, {"model_name": "x" * 301}, {"name": "x"}):
            await daemon.admin("POST", path, bad, status=400)
        await daemon.admin("POST", f"{path}?reassign=maybe", {"model_name": "x"}, status=400)

        # the same model at two servers, then at one alone
        await daemon.admin("POST", f"/servers/{other}/models", {"model_name": "org/new:1"})
        models = {row["id"]: row["models"] for row in await daemon.admin("GET", "/servers")}
        assert "org/new:1" in models[site.server_id]
        assert "org/new:1" in models[other]
        await daemon.admin("POST", f"{path}?reassign=true", {"model_name": "elsewhere"})
        models = {row["id"]: row["models"] for row in await daemon.admin("GET", "/servers")}
        assert "elsewhere" in models[site.server_id]
        assert "elsewhere" not in models[other]

        await daemon.admin("DELETE", f"{path}/org/new:1")
        await daemon.admin("DELETE", f"{path}/org/new:1", status=404)
        await daemon.admin("DELETE", path, {"model_name": "org/new:1"}, status=404)
        await daemon.admin("DELETE", path, status=400)
        await daemon.admin("DELETE", f"/servers/{other}")


async def test_aliases(daemon: Daemon, site: Site) -> None:
    answer = await daemon.admin("POST", "/aliases", {"alias_name": "fast", "real_model_name": site.model})
    assert answer == {"ok": True, "alias_name": "fast", "real_model_name": site.model}
    await daemon.admin("POST", "/aliases", {"alias_name": "fast", "real_model_name": site.model}, status=409)
    await daemon.admin("POST", "/aliases", {"alias_name": site.model, "real_model_name": "x"}, status=409)
    await daemon.admin("POST", "/aliases", {"alias_name": "faster", "real_model_name": "fast"}, status=400)
    await daemon.admin("PATCH", "/aliases/fast", {"real_model_name": "fast"}, status=400)
    await daemon.admin("PATCH", "/aliases/fast", {}, status=400)
    assert await daemon.admin("GET", "/aliases") == [{"alias_name": "fast", "real_model_name": site.model}]

    later = await daemon.admin("POST", "/aliases", {"alias_name": "later", "real_model_name": "not-there-yet"})
    assert later["ok"] is True
    assert "not-there-yet" in later["warning"]
    assert (await site.chat(model="later")).status == 404
    await daemon.admin("PATCH", "/aliases/later", {"real_model_name": site.model})
    assert (await site.chat(model="later")).status == 200
    for alias in ("fast", "later"):
        assert (await daemon.admin("DELETE", f"/aliases/{alias}"))["ok"] is True
        assert (await site.chat(model=alias)).status == 404


async def test_an_alias_is_replaced_in_the_body_and_nothing_else(daemon: Daemon, site: Site) -> None:
    await daemon.admin("POST", "/aliases", {"alias_name": "kurz", "real_model_name": site.model})
    body = ' { "messages" : [{"role":"user","content":"say \\"model\\": \\u00e4"}],\n "model"  : "kurz" , "x": 1e2}'
    answer = await daemon.ask("POST", "/v1/chat/completions", key=site.key, data=body)
    assert answer.status == 200
    (request,) = site.generating()
    assert request.body == body.replace('"kurz"', f'"{site.model}"').encode()
    row = daemon.row(answer.headers["x-request-id"])
    assert (row["model_name"], row["real_model_name"]) == ("kurz", site.model)
    await daemon.admin("DELETE", "/aliases/kurz")
