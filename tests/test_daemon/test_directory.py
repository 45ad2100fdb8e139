"""The directory: what is held in memory, and when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from smolproxy.daemon import directory as module
from smolproxy.daemon.directory import Directory
from smolproxy.daemon.tasks import Tasks
from smolproxy.errors import Conflict, DatabaseError
from smolproxy.settings import Settings
from smolproxy.store import aliases, keys, servers
from smolproxy.store.database import Database


class Counting(Database):
    """A database that counts what is asked of it, and can fail."""

    asked = 0
    broken = False

    async def fetch_all(self, sql: str, parameters: Any = ()) -> list[Any]:
        self.asked += 1
        if self.broken:
            raise DatabaseError("cannot be read")
        return await super().fetch_all(sql, parameters)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Counting]:
    opened = await Counting.open(tmp_path / "proxy.db")
    assert isinstance(opened, Counting)
    yield opened
    opened.broken = False
    await opened.close()


@pytest.fixture
async def directory(database: Counting) -> AsyncIterator[Directory]:
    tasks = Tasks()
    made = Directory(database, Settings(), tasks)
    await made.refresh()
    yield made
    await tasks.drain(5)
    await made.close()


async def test_a_known_key_is_asked_for_once(directory: Directory, database: Counting) -> None:
    key, secret = await keys.create(database)
    before = database.asked
    for _ in range(5):
        assert await directory.key(secret) == key
    assert database.asked == before + 1


async def test_an_unknown_key_is_not_held(directory: Directory, database: Counting) -> None:
    assert await directory.key("sk-nobodys") is None
    assert await directory.key("") is None
    _, secret = await keys.create(database)
    assert await directory.key(secret) is not None


async def test_a_changed_key_is_read_anew(directory: Directory, database: Counting) -> None:
    key, secret = await keys.create(database)
    assert await directory.key(secret) is not None
    await keys.set_active(database, key.id, False)
    assert await directory.key(secret) is not None  # nobody has said so yet
    await directory.refresh()
    assert await directory.key(secret) is None


async def test_an_expired_key_is_none(directory: Directory, database: Counting) -> None:
    key, secret = await keys.create(database)
    await keys.set_limits(database, key.id, {"expires_at": 1})
    assert await directory.key(secret) is None


async def test_a_key_read_while_keys_change_is_not_held(directory: Directory, database: Counting) -> None:
    key, secret = await keys.create(database)
    await directory.refresh()
    reading = asyncio.ensure_future(directory.key(secret))
    await asyncio.sleep(0)
    await keys.set_active(database, key.id, False)
    await directory.refresh()
    await reading
    assert await directory.key(secret) is None


async def test_not_more_keys_are_held_than_fit(directory: Directory, database: Counting, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_MOST_KEYS", 2)
    secrets = [(await keys.create(database))[1] for _ in range(3)]
    await directory.refresh()
    for secret in secrets:
        assert await directory.key(secret) is not None
    assert len(directory._keys) == 1


async def test_routes_aliases_and_what_is_listed(directory: Directory, database: Counting) -> None:
    one = await servers.add(database, "one", "http://127.0.0.1:1", models=["m", "shared"])
    two = await servers.add(database, "two", "http://127.0.0.1:2", models=["shared"])
    await aliases.set_alias(database, "a", "shared")
    await aliases.set_alias(database, "later", "unknown")
    await directory.refresh()
    assert directory.active_servers == 2

    def found(name: str) -> Any:
        answer = directory.resolve(name)
        return answer and (answer[0], [server.record.name for server in answer[1]])

    assert found("m") == ("m", ["one"])
    assert found("shared") == ("shared", ["one", "two"])
    assert found("a") == ("shared", ["one", "two"])
    assert found("later") is None
    assert found("nothing") is None
    assert {name: real for name, real, _ in directory.names()} == {"m": "m", "shared": "shared", "a": "shared"}

    await servers.update(database, one.id, {"active": False})
    await directory.refresh()
    assert {name for name, _, _ in directory.names()} == {"shared", "a"}
    assert found("m") == ("m", ["one"])
    await servers.remove(database, two.id)
    await directory.refresh()
    assert [name for name, _, _ in directory.names()] == []


async def test_a_model_that_a_server_tells_of_wins_over_an_alias(directory: Directory, database: Counting) -> None:
    added = await servers.add(database, "one", "http://127.0.0.1:1")
    await aliases.set_alias(database, "told", "other")
    await directory.refresh()
    directory.check_alias("told")
    assert directory.servers[added.id].learn(["told", "other"], 2)
    directory.rebuild()
    with pytest.raises(Conflict):
        directory.check_alias("told")
    answer = directory.resolve("told")
    assert answer is not None
    assert answer[0] == "told"
    assert sorted(name for name, _, _ in directory.names()) == ["other", "told"]


async def test_a_changed_server_keeps_its_pool_unless_it_is_another(directory: Directory, database: Counting) -> None:
    added = await servers.add(database, "one", "http://127.0.0.1:1", models=["m"])
    await directory.refresh()
    first = directory.servers[added.id]
    await servers.update(database, added.id, {"name": "renamed", "slots": 3})
    await directory.refresh()
    assert directory.servers[added.id] is first
    assert (first.record.name, first.slots) == ("renamed", 3)
    for change in ({"url": "http://127.0.0.1:2"}, {"api_key": "k"}):
        before = directory.servers[added.id]
        await servers.update(database, added.id, change)
        await directory.refresh()
        assert directory.servers[added.id] is not before


async def test_a_removed_servers_pool_is_closed_when_its_requests_have_ended(
    database: Counting, monkeypatch: Any
) -> None:
    tasks = Tasks()
    directory = Directory(database, Settings(), tasks)
    added = await servers.add(database, "one", "http://127.0.0.1:1", models=["m"])
    await directory.refresh()
    server = directory.servers[added.id]
    server.in_flight = 1
    await servers.remove(database, added.id)
    await directory.refresh()
    await asyncio.sleep(0.01)
    assert len(tasks) == 1
    assert not server._session.closed
    server.in_flight = 0
    await tasks.drain(5)
    assert server._session.closed


async def test_a_database_that_cannot_be_read_is_told_once_and_what_is_held_stays(
    directory: Directory, database: Counting, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "POLL", 0.005)
    _, secret = await keys.create(database)
    await servers.add(database, "one", "http://127.0.0.1:1", models=["m"])
    await directory.refresh()
    assert await directory.key(secret) is not None
    with structlog.testing.capture_logs() as logs:
        polling = asyncio.ensure_future(directory.poll())
        database.broken = True
        while directory.failing is None:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert directory.resolve("m") is not None
        assert await directory.key(secret) is not None
        with pytest.raises(DatabaseError):
            await directory.key("another")
        database.broken = False
        while directory.failing is not None:
            await asyncio.sleep(0.005)
        polling.cancel()
    assert [record["event"] for record in logs] == ["the database cannot be read"]
