"""Servers and the model names listed under them.

This module owns the rows of ``servers`` and ``server_models``. How a server fares is not in the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smolproxy.core.names import check_name
from smolproxy.core.urls import normalise_url
from smolproxy.errors import Conflict, Invalid, NotFound
from smolproxy.store.database import Database

_ALIVE = """
    SELECT id, name, url, active, listed, slots, created_at, api_key, model_name
    FROM servers LEFT JOIN server_models ON server_id = id
    WHERE deleted_at IS NULL
"""
_FIELDS = ("name", "url", "api_key", "active", "models", "slots")


@dataclass(frozen=True, slots=True)
class Server:
    """A server as the administrator described it."""

    id: int
    name: str
    url: str  # normalised: no trailing slash, no query
    active: bool
    models: tuple[str, ...]  # as listed by the administrator
    slots: int | None  # None: the server itself is asked
    created_at: int  # Unix time, milliseconds
    api_key: str | None = field(default=None, repr=False)
    listed: bool = False  # the list is all that it serves; else the server itself is asked


async def add(
    db: Database,
    name: str,
    url: str,
    *,
    api_key: str | None = None,
    models: Sequence[str] = (),
    slots: int | None = None,
) -> Server:
    """Add a server, enabled.

    :raises Conflict: the name is taken; Invalid: a bad name, URL, key, model name or number of slots.
    """
    values = _checked({"name": name, "url": url, "api_key": api_key, "models": models, "slots": slots})
    async with db.transaction():
        await _require_free(db, name)
        server_id = await db.insert_row(
            "INSERT INTO servers (name, url, api_key, listed, slots, created_at) VALUES (?, ?, ?, ?, ?, ?)",
            (
                values["name"],
                values["url"],
                values["api_key"],
                bool(values["models"]),
                values["slots"],
                time.time_ns() // 1_000_000,
            ),
        )
        await _write_models(db, server_id, values["models"])
        return await get(db, server_id)


async def list_all(db: Database) -> list[Server]:
    """Return the servers by id, without removed ones, each with its models in the order they were listed."""
    return _servers(await db.fetch_all(_ALIVE + "ORDER BY id, position"))


async def get(db: Database, server_id: int) -> Server:
    """Return one server. :raises NotFound: there is none, or it has been removed."""
    rows = await db.fetch_all(_ALIVE + "AND id = ? ORDER BY position", (server_id,)) if 0 < server_id < 2**63 else []
    if not rows:
        raise NotFound(f"there is no server {server_id}")
    return _servers(rows)[0]


async def update(db: Database, server_id: int, changes: Mapping[str, Any]) -> Server:
    """Change the given fields, leave the others.

    :param changes: any of ``name``, ``url``, ``api_key`` (None or "" clears), ``active``, ``models`` (replaces the
        list; an empty one: ask the server), ``slots`` (None: ask the server).
    :raises NotFound: no such server; Conflict: the name is taken; Invalid: nothing to change, an unknown field, a
        value of the wrong type or one that cannot be accepted.
    """
    values = _checked(changes)
    if not values:
        raise Invalid(f"nothing to change: give any of {', '.join(_FIELDS)}")
    async with db.transaction():
        old = await get(db, server_id)
        new = replace(old, **values)
        if "models" in values:
            new = replace(new, listed=bool(new.models))
        if new.name != old.name:
            await _require_free(db, new.name)
        await db.fetch_all(
            "UPDATE servers SET name = ?, url = ?, api_key = ?, active = ?, listed = ?, slots = ? WHERE id = ?",
            (new.name, new.url, new.api_key, new.active, new.listed, new.slots, server_id),
        )
        if new.models != old.models:
            await db.fetch_all("DELETE FROM server_models WHERE server_id = ?", (server_id,))
            await _write_models(db, server_id, new.models)
        return new


async def remove(db: Database, server_id: int) -> None:
    """Remove a server: its key and its models go, its name stays for the books and may be used again.

    :raises NotFound: no such server.
    """
    async with db.transaction():
        await get(db, server_id)
        await db.fetch_all("DELETE FROM server_models WHERE server_id = ?", (server_id,))
        await db.fetch_all(
            "UPDATE servers SET deleted_at = ?, active = 0, api_key = NULL WHERE id = ?",
            (time.time_ns() // 1_000_000, server_id),
        )


async def list_models(db: Database, server_id: int, models: Sequence[str]) -> Server:
    """Make these a server's list, even if there are none: it is not asked any more.

    :raises NotFound: no such server; Invalid: a bad name.
    """
    names = _check_models(models)
    async with db.transaction():
        server = await get(db, server_id)
        await db.fetch_all("UPDATE servers SET listed = 1 WHERE id = ?", (server_id,))
        await db.fetch_all("DELETE FROM server_models WHERE server_id = ?", (server_id,))
        await _write_models(db, server_id, names)
        return replace(server, models=names, listed=True)


async def add_model(db: Database, server_id: int, model: str, *, reassign: bool = False) -> Server:
    """List a model under a server, last. One that was asked itself is not any more.

    :param reassign: take it away from all other servers, in the same transaction.
    :raises NotFound: no such server; Conflict: this server has it already; Invalid: a bad name.
    """
    check_name("model name", model)
    async with db.transaction():
        server = await get(db, server_id)
        if model in server.models:
            raise Conflict(f"server {server.name!r} has model {model!r} already")
        if reassign:
            await db.fetch_all("DELETE FROM server_models WHERE model_name = ?", (model,))
        await db.fetch_all("UPDATE servers SET listed = 1 WHERE id = ?", (server_id,))
        await _write_models(db, server_id, (model,))
        return replace(server, models=(*server.models, model), listed=True)


async def remove_model(db: Database, server_id: int, model: str) -> Server:
    """Take a model off a server's list, which may be empty then. :raises NotFound: no such server, or not listed."""
    async with db.transaction():
        server = await get(db, server_id)
        if model not in server.models:
            raise NotFound(f"server {server.name!r} has no model {model!r}")
        await db.fetch_all("DELETE FROM server_models WHERE server_id = ? AND model_name = ?", (server_id, model))
        return replace(server, models=tuple(other for other in server.models if other != model))


async def _require_free(db: Database, name: str) -> None:
    if await db.fetch_all("SELECT 1 FROM servers WHERE name = ? AND deleted_at IS NULL", (name,)):
        raise Conflict(f"there is a server {name!r} already")


async def _write_models(db: Database, server_id: int, models: Sequence[str]) -> None:
    """Append to the server's list."""
    if models:
        await db.execute_many(
            """
            INSERT INTO server_models (server_id, model_name, position)
            SELECT ?1, ?2, ifnull(max(position), 0) + 1 FROM server_models WHERE server_id = ?1
            """,
            [(server_id, model) for model in models],
        )


def _servers(rows: Sequence[Any]) -> list[Server]:
    """One server of all rows with its id: there is a row for each model, and one without if there is none."""
    found: dict[int, Server] = {}
    models: dict[int, list[str]] = {}
    for row in rows:
        server_id = row["id"]
        if server_id not in found:
            found[server_id] = Server(
                id=server_id,
                name=row["name"],
                url=row["url"],
                active=bool(row["active"]),
                models=(),
                slots=row["slots"],
                created_at=row["created_at"],
                api_key=row["api_key"],
                listed=bool(row["listed"]),
            )
        if row["model_name"] is not None:
            models.setdefault(server_id, []).append(row["model_name"])
    return [replace(server, models=tuple(models.get(server.id, ()))) for server in found.values()]


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they are stored."""
    unknown = sorted(set(values) - set(_FIELDS))
    if unknown:
        raise Invalid(f"unknown field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    return {name: _CHECKS[name](value) for name, value in values.items()}


def _check_api_key(value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise Invalid("api_key must be a string")
    if not (value.isascii() and value.isprintable() and value == value.strip()):
        raise Invalid("api_key must hold printable ASCII only, without spaces around it")
    return value


def _check_active(value: object) -> bool:
    if not isinstance(value, bool):
        raise Invalid("active must be true or false")
    return value


def _check_models(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise Invalid("models must be a list of model names")
    return tuple(dict.fromkeys(check_name("model name", model) for model in value))


def _check_slots(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Invalid("slots must be a whole number from 1 up, or left out to ask the server")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": lambda value: check_name("server name", value),
    "url": normalise_url,
    "api_key": _check_api_key,
    "active": _check_active,
    "models": _check_models,
    "slots": _check_slots,
}
