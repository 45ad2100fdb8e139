"""A database of each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from smolproxy.store.database import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "proxy.db"


@pytest_asyncio.fixture
async def db(path: Path) -> AsyncIterator[Database]:
    database = await Database.open(path)
    yield database
    await database.close()
