"""Retention: usage rows older than ``retention_days`` are purged in small batches; their totals stay.

The file shrinks by what is free then, in small batches too. After each one the database is left alone for as long as
it took: usage rows of running requests are written in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from smolproxy.errors import SmolproxyError
from smolproxy.store import usage
from smolproxy.store.database import Database

T = TypeVar("T")

log = structlog.get_logger("smolproxy")

_INTERVAL = 3600.0  # seconds between purges
_ROWS = 500  # deleted at once: some 10 ms
_PAGES = 250  # given back to the disk at once
_DAY = 86_400_000  # milliseconds


class Retention:
    """Purges usage rows.

    :param days: how long rows are kept; 0: for ever.
    """

    def __init__(self, database: Database, days: float) -> None:
        self._database = database
        self._days = days

    async def run(self) -> None:
        """Purge now and every hour, until cancelled."""
        while self._days:
            try:
                purged = await self.purge()
            except SmolproxyError as error:
                log.warning("usage rows not purged", reason=str(error))
            else:
                if purged:
                    log.info("usage rows purged", rows=purged, older_than_days=self._days)
            await asyncio.sleep(_INTERVAL)

    async def purge(self) -> int:
        """Purge what is too old; returns how many rows."""
        before = int(time.time() * 1000 - self._days * _DAY)
        total = 0
        while count := await _step(usage.purge(self._database, before, batch=_ROWS)):
            total += count
        if total:
            while await _step(self._database.shrink(_PAGES)):
                pass
        return total


async def _step(work: Coroutine[Any, Any, T]) -> T:
    started = time.monotonic()
    done = await work
    await asyncio.sleep(time.monotonic() - started)
    return done
