"""Keys in the file: the secret is not, deleting keeps the name, every change is noticed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from smolproxy.core import tokens
from smolproxy.core.limits import Limits
from smolproxy.errors import Invalid, NotFound
from smolproxy.store import keys
from smolproxy.store.database import Database

ALL_LIMITS = Limits(
    rpm_limit=0,
    tpm_limit=1,
    parallel_limit=2,
    budget=2**40,
    budget_period="week",
    models=("qwen*", "ümlaut", 'with "quotes"'),
    expires_at=1_800_000_000_000,
    max_tokens=5,
    priority=6,
)


async def test_a_key_is_made_shown_once_and_found_by_its_digest(db: Database, path: Path) -> None:
    before = time.time_ns() // 1_000_000
    key, secret = await keys.create(db, "ann")
    assert (key.id, key.name, key.active, key.limits) == (1, "ann", True, Limits())
    assert key.prefix == tokens.prefix(secret)
    assert before <= key.created_at <= time.time_ns() // 1_000_000
    assert await keys.find(db, tokens.digest(secret)) == key == await keys.get(db, 1)
    assert await keys.find(db, tokens.digest("sk-other")) is None
    await db.close()
    assert all(secret.encode() not in file.read_bytes() for file in path.parent.iterdir())


async def test_names_need_not_differ_and_default_to_unnamed(db: Database) -> None:
    await keys.create(db)
    await keys.create(db, "unnamed")
    await keys.create(db, " 模型/ü ")
    assert [(key.id, key.name) for key in await keys.list_all(db)] == [(1, "unnamed"), (2, "unnamed"), (3, " 模型/ü ")]


@pytest.mark.parametrize("name", ["", "  ", "x" * 301, "a\nb"])
async def test_a_bad_name_makes_no_key(db: Database, name: str) -> None:
    with pytest.raises(Invalid, match="key name"):
        await keys.create(db, name)
    assert await keys.list_all(db) == []


async def test_all_limits_come_back_as_given(db: Database) -> None:
    key, _ = await keys.create(db, "ann", ALL_LIMITS)
    assert key.limits == ALL_LIMITS
    assert (await keys.get(db, key.id)).limits == ALL_LIMITS


async def test_set_limits_sets_what_is_given_and_leaves_the_rest(db: Database) -> None:
    key, _ = await keys.create(db, "ann", ALL_LIMITS)
    await keys.create(db, "bob", ALL_LIMITS)
    changed = await keys.set_limits(db, key.id, {"rpm_limit": 7, "models": None, "expires_at": None})
    assert changed.limits == Limits(
        rpm_limit=7, tpm_limit=1, parallel_limit=2, budget=2**40, budget_period="week", max_tokens=5, priority=6
    )
    assert await keys.get(db, key.id) == changed
    assert (await keys.set_limits(db, key.id, {"models": ()})).limits.models == ()  # none at all, not: all
    assert (await keys.get(db, 2)).limits == ALL_LIMITS


async def test_set_limits_refuses_an_unknown_name(db: Database) -> None:
    await keys.create(db)
    with pytest.raises(Invalid, match="unknown limit 'rpm'; there are rpm_limit, "):
        await keys.set_limits(db, 1, {"rpm": 1})
    with pytest.raises(Invalid, match="too large"):
        await keys.set_limits(db, 1, {"budget": 2**63})
    assert (await keys.get(db, 1)).limits == Limits()


async def test_disable_enable_and_flip(db: Database) -> None:
    key, secret = await keys.create(db)
    assert not (await keys.set_active(db, key.id, False)).active
    found = await keys.find(db, tokens.digest(secret))
    assert found is not None
    assert not found.active
    assert not (await keys.set_active(db, key.id, False)).active
    assert (await keys.set_active(db, key.id, None)).active
    assert (await keys.get(db, key.id)).active
    assert not (await keys.set_active(db, key.id, None)).active


async def test_rotate_changes_the_secret_alone(db: Database) -> None:
    key, old = await keys.create(db, "ann", ALL_LIMITS)
    rotated, new = await keys.rotate(db, key.id)
    assert new != old
    assert (rotated.id, rotated.name, rotated.limits, rotated.created_at) == (1, "ann", ALL_LIMITS, key.created_at)
    assert await keys.find(db, tokens.digest(old)) is None
    assert await keys.find(db, tokens.digest(new)) == rotated
    assert rotated.prefix == tokens.prefix(new)


async def test_a_deleted_key_leaves_its_name_alone_and_its_id_to_nobody(db: Database) -> None:
    key, secret = await keys.create(db, "ann", ALL_LIMITS)
    await keys.delete(db, key.id)
    assert await keys.find(db, tokens.digest(secret)) is None
    assert await keys.list_all(db) == []
    [row] = await db.fetch_all("SELECT name, hash, prefix, active FROM keys")
    assert tuple(row) == ("ann", None, "", 0)
    assert (await keys.create(db, "bob"))[0].id == 2


@pytest.mark.parametrize("key_id", [0, -1, 2, 3, 2**63, 10**30])
async def test_an_unknown_or_deleted_key_is_not_found(db: Database, key_id: int) -> None:
    await keys.create(db, "here")
    await keys.create(db, "deleted")
    await keys.delete(db, 2)
    for attempt in (
        keys.get(db, key_id),
        keys.set_active(db, key_id, None),
        keys.rotate(db, key_id),
        keys.delete(db, key_id),
        keys.set_limits(db, key_id, {"priority": 1}),
    ):
        with pytest.raises(NotFound, match=f"there is no key {key_id}"):
            await attempt


async def test_no_repr_has_a_secret_or_its_digest(db: Database) -> None:
    key, secret = await keys.create(db)
    assert secret not in repr(key)
    assert tokens.digest(secret) not in repr(key)
