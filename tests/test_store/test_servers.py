"""Servers in the file: names of the living are unique, model lists keep their order, keys stay out of sight."""

from __future__ import annotations

from typing import Any

import pytest

from smolproxy.errors import Conflict, Invalid, NotFound
from smolproxy.store import servers
from smolproxy.store.database import Database

URL = "http://10.0.0.5:8080"
NAMES = ["org/model:q4 k", "%2F", "模型", "x" * 300, " a "]


async def test_a_server_comes_back_as_added(db: Database) -> None:
    server = await servers.add(db, "big/gpu: 1%", f"{URL}/v1/", api_key="sk-1", models=["b", *NAMES, "a"], slots=4)
    assert (server.id, server.name, server.url, server.active) == (1, "big/gpu: 1%", URL, True)
    assert (server.models, server.slots, server.api_key) == (("b", *NAMES, "a"), 4, "sk-1")
    assert await servers.get(db, 1) == server
    assert await servers.list_all(db) == [server]
    assert "sk-1" not in repr(server)


async def test_everything_but_name_and_url_may_be_left_out(db: Database) -> None:
    server = await servers.add(db, "a", URL)
    assert (server.models, server.slots, server.api_key) == ((), None, None)
    assert (await servers.add(db, "b", URL, api_key="")).api_key is None
    assert [each.name for each in await servers.list_all(db)] == ["a", "b"]


async def test_a_taken_name_is_a_conflict_and_changes_nothing(db: Database) -> None:
    await servers.add(db, "a", URL)
    await servers.add(db, "b", URL)
    before = await servers.list_all(db)
    with pytest.raises(Conflict, match="'a'"):
        await servers.add(db, "a", "http://other", models=["m"])
    with pytest.raises(Conflict, match="'a'"):
        await servers.update(db, 2, {"name": "a", "url": "http://other"})
    assert await servers.list_all(db) == before
    assert (await servers.update(db, 2, {"name": "b", "slots": 3})).slots == 3  # its own name is free to it


@pytest.mark.parametrize(
    "values",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": 7},
        {"url": "10.0.0.5:8080"},
        {"url": None},
        {"api_key": 7},
        {"api_key": "a\r\nX: y"},
        {"api_key": "schlüssel"},
        {"api_key": " a"},
        {"models": "m"},
        {"models": None},
        {"models": ["m", ""]},
        {"models": ["m", 7]},
        {"models": {"m": 1}},
        {"slots": 0},
        {"slots": -1},
        {"slots": True},
        {"slots": 1.5},
        {"slots": "4"},
        {"slots": 2**63},
    ],
)
async def test_bad_values_are_refused_by_add_and_update(db: Database, values: dict[str, Any]) -> None:
    server = await servers.add(db, "there", URL, models=["m"], slots=1)
    with pytest.raises(Invalid):
        await servers.add(db, **{"name": "new", "url": URL, **values})
    with pytest.raises(Invalid):
        await servers.update(db, 1, values)
    assert await servers.list_all(db) == [server]


@pytest.mark.parametrize("values", [{}, {"id": 2}, {"name": "x", "colour": "red"}, {"active": None}, {"active": 1}])
async def test_update_needs_known_fields(db: Database, values: dict[str, Any]) -> None:
    server = await servers.add(db, "there", URL)
    with pytest.raises(Invalid):
        await servers.update(db, 1, values)
    assert await servers.get(db, 1) == server


async def test_update_changes_what_is_given_and_leaves_the_rest(db: Database) -> None:
    old = await servers.add(db, "a", URL, api_key="sk-1", models=["m", "n"], slots=4)
    other = await servers.add(db, "b", URL, models=["m"])
    new = await servers.update(db, 1, {"models": ["n", "o", "m", "o"], "active": False, "api_key": None})
    assert (new.models, new.active, new.api_key) == (("n", "o", "m"), False, None)
    assert (new.name, new.url, new.slots, new.created_at) == (old.name, old.url, old.slots, old.created_at)
    assert await servers.get(db, 1) == new
    assert (await servers.update(db, 1, {"slots": None, "models": []})).models == ()
    assert (await servers.get(db, 1)).slots is None
    assert await servers.get(db, 2) == other


async def test_models_are_added_last_and_removed_by_exact_name(db: Database) -> None:
    await servers.add(db, "a", URL, models=["z"])
    for name in NAMES:
        await servers.add_model(db, 1, name)
    server = await servers.get(db, 1)
    assert server.models == ("z", *NAMES)
    with pytest.raises(Conflict, match="has model 'z' already"):
        await servers.add_model(db, 1, "z")
    with pytest.raises(NotFound, match="no model 'Z'"):
        await servers.remove_model(db, 1, "Z")
    with pytest.raises(Invalid, match="model name"):
        await servers.add_model(db, 1, "")
    for name in NAMES:
        server = await servers.remove_model(db, 1, name)
        assert await servers.get(db, 1) == server
    assert server.models == ("z",)


async def test_reassign_takes_the_model_from_all_others(db: Database) -> None:
    for name in "abc":
        await servers.add(db, name, URL, models=["m", "n"] if name != "c" else [])
    shared = await servers.add_model(db, 3, "n")
    assert shared.models == ("n",)
    await servers.add_model(db, 3, "m", reassign=True)
    assert [server.models for server in await servers.list_all(db)] == [("n",), ("n",), ("n", "m")]
    with pytest.raises(Conflict):
        await servers.add_model(db, 1, "n", reassign=True)
    assert [server.models for server in await servers.list_all(db)] == [("n",), ("n",), ("n", "m")]


async def test_a_removed_server_leaves_its_name_and_frees_it(db: Database) -> None:
    await servers.add(db, "a", URL, api_key="sk-1", models=["m"])
    await servers.remove(db, 1)
    assert await servers.list_all(db) == []
    [row] = await db.fetch_all("SELECT name, api_key, active FROM servers")
    assert tuple(row) == ("a", None, 0)
    assert await db.fetch_all("SELECT * FROM server_models") == []
    again = await servers.add(db, "a", URL)
    assert again.id == 2
    await servers.remove(db, 2)
    assert len(await db.fetch_all("SELECT id FROM servers WHERE name = 'a'")) == 2


@pytest.mark.parametrize("server_id", [0, -1, 2, 3, 2**63, 10**30])
async def test_an_unknown_or_removed_server_is_not_found(db: Database, server_id: int) -> None:
    await servers.add(db, "here", URL)
    await servers.add(db, "removed", URL, models=["m"])
    await servers.remove(db, 2)
    for attempt in (
        servers.get(db, server_id),
        servers.update(db, server_id, {"slots": 1}),
        servers.remove(db, server_id),
        servers.add_model(db, server_id, "m"),
        servers.remove_model(db, server_id, "m"),
    ):
        with pytest.raises(NotFound, match=f"there is no server {server_id}"):
            await attempt
