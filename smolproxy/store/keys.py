"""API keys: only their SHA-256 and a prefix are in the file.

This module owns the rows of ``keys``. Whether a key may be used now is for those to decide who read it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from smolproxy.core import tokens
from smolproxy.core.limits import Limits
from smolproxy.core.names import check_name
from smolproxy.errors import Invalid, NotFound
from smolproxy.store.database import Database

_NO_LIMITS = Limits()
_LIMIT_NAMES = tuple(field.name for field in fields(Limits))
_ALIVE = """
    SELECT id, name, prefix, active, created_at, hash, rpm_limit, tpm_limit, parallel_limit, budget, budget_period,
           models, expires_at, max_tokens, priority
    FROM keys WHERE deleted_at IS NULL
"""


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as administrators see it; the secret itself is nowhere."""

    id: int
    name: str
    prefix: str
    active: bool
    created_at: int  # Unix time, milliseconds
    limits: Limits


async def create(db: Database, name: str = "unnamed", limits: Limits = _NO_LIMITS) -> tuple[Key, str]:
    """Make a key; return its row and the secret, which is not stored and cannot be had again.

    :raises Invalid: the name is empty, too long or not printable.
    """
    check_name("key name", name)
    secret = tokens.new_key()
    async with db.transaction():
        key_id = await db.insert_row(
            "INSERT INTO keys (name, hash, prefix, created_at) VALUES (?, ?, ?, ?)",
            (name, tokens.digest(secret), tokens.prefix(secret), time.time_ns() // 1_000_000),
        )
        if limits != _NO_LIMITS:
            await _write_limits(db, key_id, limits)
        return await get(db, key_id), secret


async def list_all(db: Database) -> list[Key]:
    """Return the keys by id, without deleted ones."""
    return [_key(row) for row in await db.fetch_all(_ALIVE + "ORDER BY id")]


async def get(db: Database, key_id: int) -> Key:
    """Return one key. :raises NotFound: there is none, or it has been deleted."""
    rows = await db.fetch_all(_ALIVE + "AND id = ?", (key_id,)) if 0 < key_id < 2**63 else []
    if not rows:
        raise NotFound(f"there is no key {key_id}")
    return _key(rows[0])


async def find(db: Database, digest: str) -> Key | None:
    """Return the key with this :func:`smolproxy.core.tokens.digest`, disabled and expired ones included, or None."""
    rows = await db.fetch_all(_ALIVE + "AND hash = ?", (digest,))
    return _key(rows[0]) if rows else None


async def set_active(db: Database, key_id: int, active: bool | None) -> Key:
    """Enable or disable a key; None flips it. :raises NotFound:"""
    async with db.transaction():
        key = await get(db, key_id)
        wanted = not key.active if active is None else active
        await db.fetch_all("UPDATE keys SET active = ? WHERE id = ?", (wanted, key_id))
        return replace(key, active=wanted)


async def delete(db: Database, key_id: int) -> None:
    """Delete a key: what could admit anyone goes, its name stays for the books. :raises NotFound:"""
    async with db.transaction():
        await get(db, key_id)
        await db.fetch_all(
            "UPDATE keys SET deleted_at = ?, active = 0, hash = NULL, prefix = '' WHERE id = ?",
            (time.time_ns() // 1_000_000, key_id),
        )


async def rotate(db: Database, key_id: int) -> tuple[Key, str]:
    """Replace the secret; return the row and the new secret. The old one is void. :raises NotFound:"""
    secret = tokens.new_key()
    async with db.transaction():
        key = await get(db, key_id)
        await db.fetch_all(
            "UPDATE keys SET hash = ?, prefix = ? WHERE id = ?",
            (tokens.digest(secret), tokens.prefix(secret), key_id),
        )
        return replace(key, prefix=tokens.prefix(secret)), secret


async def set_limits(db: Database, key_id: int, changes: Mapping[str, Any]) -> Key:
    """Set the given fields of :class:`Limits` (values already validated; None clears), leave the others.

    :raises NotFound: no such key; Invalid: a name that is no limit's.
    """
    unknown = sorted(set(changes) - set(_LIMIT_NAMES))
    if unknown:
        raise Invalid(f"unknown limit {unknown[0]!r}; there are {', '.join(_LIMIT_NAMES)}")
    async with db.transaction():
        key = await get(db, key_id)
        await _write_limits(db, key_id, replace(key.limits, **changes))
        return await get(db, key_id)


async def _write_limits(db: Database, key_id: int, limits: Limits) -> None:
    models = None if limits.models is None else json.dumps(list(limits.models), ensure_ascii=False)
    values = {**{name: getattr(limits, name) for name in _LIMIT_NAMES}, "models": models}
    await db.fetch_all(
        """
        UPDATE keys SET rpm_limit = ?, tpm_limit = ?, parallel_limit = ?, budget = ?, budget_period = ?, models = ?,
               expires_at = ?, max_tokens = ?, priority = ? WHERE id = ?
        """,
        (*values.values(), key_id),
    )


def _key(row: Any) -> Key:
    values = {name: row[name] for name in _LIMIT_NAMES}
    if values["models"] is not None:
        values["models"] = tuple(json.loads(values["models"]))
    return Key(row["id"], row["name"], row["prefix"], bool(row["active"]), row["created_at"], Limits(**values))
