"""Retention: usage rows older than ``retention_days`` are purged in small batches; their totals stay."""

from __future__ import annotations

import asyncio
import time

import structlog

from smolproxy.errors import SmolproxyError
from smolproxy.store import usage
from smolproxy.store.database import Database

log = structlog.get_logger("smolproxy")

_INTERVAL = 3600.0  # seconds between purges
_PAUSE = 0.05  # seconds between batches, in which usage rows are written
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
        while count := await usage.purge(self._database, before):
            total += count
            await asyncio.sleep(_PAUSE)
        return total
