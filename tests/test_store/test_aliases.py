"""Aliases in the file: none stands for another, none in the way of a model."""

from __future__ import annotations

import pytest

from smolproxy.errors import Conflict, Invalid, NotFound
from smolproxy.store import aliases, servers
from smolproxy.store.aliases import Alias
from smolproxy.store.database import Database

NAMES = ["org/fast:1", "100%", " a b ", "模型", "x" * 300]


async def test_aliases_are_listed_by_name_and_removed(db: Database) -> None:
    made = [await aliases.create(db, name, f"{name}"[:299] + "!") for name in NAMES]
    assert made[0] == Alias("org/fast:1", "org/fast:1!")
    assert await aliases.list_all(db) == sorted(made, key=lambda alias: alias.alias_name)
    for name in NAMES:
        await aliases.remove(db, name)
    assert await aliases.list_all(db) == []


async def test_an_alias_of_a_model_that_no_server_has_is_made(db: Database) -> None:
    assert await aliases.create(db, "fast", "missing") == Alias("fast", "missing")


@pytest.mark.parametrize("write", [aliases.create, aliases.set_alias])
async def test_an_alias_that_equals_a_listed_model_is_a_conflict(db: Database, write: object) -> None:
    await servers.add(db, "a", "http://h", models=["m"])
    for real in ("n", "m"):
        with pytest.raises(Conflict, match="there is a model 'm'"):
            await write(db, "m", real)  # type: ignore[operator]
    await servers.remove(db, 1)
    assert await write(db, "m", "n") == Alias("m", "n")  # type: ignore[operator]


async def test_an_alias_that_exists_is_a_conflict_for_create_and_changed_by_set(db: Database) -> None:
    assert await aliases.set_alias(db, "fast", "m") == Alias("fast", "m")
    with pytest.raises(Conflict, match="there is an alias 'fast'"):
        await aliases.create(db, "fast", "n")
    assert await aliases.list_all(db) == [Alias("fast", "m")]
    assert await aliases.set_alias(db, "fast", "n") == Alias("fast", "n")
    assert await aliases.update(db, "fast", "o") == Alias("fast", "o")
    assert await aliases.list_all(db) == [Alias("fast", "o")]


async def test_no_alias_of_an_alias_from_either_end(db: Database) -> None:
    await aliases.create(db, "fast", "m")
    await aliases.create(db, "slow", "n")
    for write in (aliases.create, aliases.set_alias):
        with pytest.raises(Invalid, match="'fast' is an alias itself"):
            await write(db, "faster", "fast")
        with pytest.raises(Invalid, match="alias 'fast' stands for 'm'"):
            await write(db, "m", "x")
        with pytest.raises(Invalid, match="cannot stand for itself"):
            await write(db, "me", "me")
    for change in (aliases.update, aliases.set_alias):
        with pytest.raises(Invalid, match="'fast' is an alias itself"):
            await change(db, "slow", "fast")
        with pytest.raises(Invalid, match="cannot stand for itself"):
            await change(db, "slow", "slow")
    assert await aliases.list_all(db) == [Alias("fast", "m"), Alias("slow", "n")]


@pytest.mark.parametrize(("alias", "real"), [("", "m"), ("a", " "), ("a\n", "m"), ("a", "x" * 301), ("a", "\x00")])
async def test_bad_names_are_refused(db: Database, alias: str, real: str) -> None:
    for write in (aliases.create, aliases.set_alias, aliases.update):
        with pytest.raises(Invalid):
            await write(db, alias, real)
    assert await aliases.list_all(db) == []


async def test_an_unknown_alias_is_not_found(db: Database) -> None:
    with pytest.raises(NotFound, match="there is no alias 'x'"):
        await aliases.update(db, "x", "m")
    with pytest.raises(NotFound, match="there is no alias 'x'"):
        await aliases.remove(db, "x")
