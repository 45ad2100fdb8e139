"""Retention: what is purged, and what does not stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from smolproxy.daemon import retention as module
from smolproxy.daemon.retention import Retention
from smolproxy.errors import DatabaseError
from smolproxy.store import usage
from smolproxy.store.database import Database

DAY = 86_400_000


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "proxy.db")
    now = int(time.time() * 1000)
    what = (1, None, "m", "m", "/v1/x", False, 200, "ok", 1, 0, 1, "usage", None, None, None, 1.0)
    rows = [usage.UsageRow(now - age * DAY - 1000, f"r{age}", *what) for age in range(10)]
    await usage.insert(opened, rows)
    yield opened
    await opened.close()


async def left(database: Database) -> list[str]:
    return [row["request_id"] for row in await usage.logs(database, usage.UsageFilter())]


async def test_rows_older_than_the_days_are_purged_in_batches(database: Database, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_ROWS", 2)
    before = await usage.summary(database, usage.UsageFilter())
    assert await Retention(database, 3).purge() == 7
    assert await left(database) == ["r0", "r1", "r2"]
    assert await usage.summary(database, usage.UsageFilter()) == before
    assert await Retention(database, 3).purge() == 0


async def test_for_ever_is_the_default(database: Database) -> None:
    await asyncio.wait_for(Retention(database, 0).run(), 5)
    assert len(await left(database)) == 10


async def test_a_purge_that_fails_is_told_and_tried_again(database: Database, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.001)
    original, failures = usage.purge, iter([True, False])

    async def purge(*arguments: Any, **options: Any) -> int:
        if next(failures, False):
            raise DatabaseError("the database is locked")
        return await original(*arguments, **options)

    monkeypatch.setattr(usage, "purge", purge)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.ensure_future(Retention(database, 3).run())
        while len(await left(database)) != 3:
            await asyncio.sleep(0.005)
        while "usage rows purged" not in [record["event"] for record in logs]:
            await asyncio.sleep(0.005)
        running.cancel()
    assert [record["event"] for record in logs] == ["usage rows not purged", "usage rows purged"]
    assert logs[1]["rows"] == 7
