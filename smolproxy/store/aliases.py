"""Aliases: short names that stand for a model.

This module owns the rows of ``aliases`` and sees to it that none stands for another, nor in the way of a listed model.
"""

from __future__ import annotations

from dataclasses import dataclass

from smolproxy.core.names import check_name
from smolproxy.errors import Conflict, Invalid, NotFound
from smolproxy.store.database import Database


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that may be asked for, and the model it stands for."""

    alias_name: str
    real_model_name: str


async def list_all(db: Database) -> list[Alias]:
    """Return the aliases by name."""
    rows = await db.fetch_all("SELECT alias_name, real_model_name FROM aliases ORDER BY alias_name")
    return [Alias(*row) for row in rows]


async def create(db: Database, alias_name: str, real_model_name: str) -> Alias:
    """Make an alias; that no server has the model yet is fine.

    :raises Conflict: the name is a listed model's or an alias's; Invalid: a bad name, or it would make an alias of an
        alias.
    """
    _check(alias_name, real_model_name)
    async with db.transaction():
        if await _exists(db, alias_name):
            raise Conflict(f"there is an alias {alias_name!r} already")
        return await _insert(db, alias_name, real_model_name)


async def update(db: Database, alias_name: str, real_model_name: str) -> Alias:
    """Let an alias stand for another model. :raises NotFound: no such alias; Invalid: as for :func:`create`."""
    _check(alias_name, real_model_name)
    async with db.transaction():
        await _require(db, alias_name)
        return await _update(db, alias_name, real_model_name)


async def set_alias(db: Database, alias_name: str, real_model_name: str) -> Alias:
    """Create or update. :raises Conflict: the name is a listed model's; Invalid: as for :func:`create`."""
    _check(alias_name, real_model_name)
    async with db.transaction():
        write = _update if await _exists(db, alias_name) else _insert
        return await write(db, alias_name, real_model_name)


async def remove(db: Database, alias_name: str) -> None:
    """Remove an alias. :raises NotFound: no such alias."""
    async with db.transaction():
        await _require(db, alias_name)
        await db.fetch_all("DELETE FROM aliases WHERE alias_name = ?", (alias_name,))


def _check(alias_name: str, real_model_name: str) -> None:
    check_name("alias name", alias_name)
    check_name("model name", real_model_name)


async def _exists(db: Database, alias_name: str) -> bool:
    return bool(await db.fetch_all("SELECT 1 FROM aliases WHERE alias_name = ?", (alias_name,)))


async def _require(db: Database, alias_name: str) -> None:
    if not await _exists(db, alias_name):
        raise NotFound(f"there is no alias {alias_name!r}")


async def _insert(db: Database, alias_name: str, real_model_name: str) -> Alias:
    if await db.fetch_all("SELECT 1 FROM server_models WHERE model_name = ? LIMIT 1", (alias_name,)):
        raise Conflict(f"there is a model {alias_name!r} already")
    others = await db.fetch_all("SELECT alias_name FROM aliases WHERE real_model_name = ?", (alias_name,))
    if others:
        raise Invalid(f"alias {others[0][0]!r} stands for {alias_name!r}, which cannot become an alias itself")
    await _require_no_alias(db, alias_name, real_model_name)
    await db.fetch_all("INSERT INTO aliases VALUES (?, ?)", (alias_name, real_model_name))
    return Alias(alias_name, real_model_name)


async def _update(db: Database, alias_name: str, real_model_name: str) -> Alias:
    await _require_no_alias(db, alias_name, real_model_name)
    await db.fetch_all("UPDATE aliases SET real_model_name = ? WHERE alias_name = ?", (real_model_name, alias_name))
    return Alias(alias_name, real_model_name)


async def _require_no_alias(db: Database, alias_name: str, real_model_name: str) -> None:
    if alias_name == real_model_name:
        raise Invalid(f"alias {alias_name!r} cannot stand for itself")
    if await _exists(db, real_model_name):
        raise Invalid(f"{real_model_name!r} is an alias itself: give the model that it stands for")
