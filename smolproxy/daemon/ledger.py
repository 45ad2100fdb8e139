"""Usage rows on their way into the database: batched commits, durable before the answer ends.

Whoever has put a row in may wait until it is in the file (group commit: all rows that came meanwhile share one
transaction). When the database cannot be written for :data:`PATIENCE` seconds, those who wait are let go and the
rows stay queued here, loudly, until it can. The queue is bounded: when :attr:`Ledger.full`, nothing more may be
admitted, since serving what cannot be booked is not allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from smolproxy.errors import Invalid, SmolproxyError
from smolproxy.store import usage
from smolproxy.store.database import Database
from smolproxy.store.usage import UsageRow

log = structlog.get_logger("smolproxy")

PATIENCE = 0.25
"""Seconds that an answer waits for its row."""

CAPACITY = 10_000
"""Rows that may wait for a database that cannot be written."""

_BATCH = 500  # rows in one transaction
_GATHER = 0.002  # seconds that a batch waits for the rows of other open requests: a commit costs far more than a row
_RETRY = 0.5  # seconds between attempts while the database cannot be written
_REMIND = 60.0  # seconds between lines in the log meanwhile


class Ledger:
    """The queue of usage rows and the one task that writes them.

    :param database: a connection of its own.
    """

    def __init__(self, database: Database) -> None:
        self.company: Callable[[], int] = lambda: 0  # how many requests are open, whose rows may come soon
        self._database = database
        self._rows: list[UsageRow] = []
        self._waiting: list[asyncio.Future[None]] = []  # parallel to _rows
        self._work = asyncio.Event()
        self._all = asyncio.Event()  # nobody is left whose row could come
        self._empty = asyncio.Event()
        self._empty.set()
        self._batch = _BATCH
        self._failing_since: float | None = None
        self._remind_at = 0.0
        self._reason = ""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether no more rows can be taken."""
        return len(self._rows) >= CAPACITY

    @property
    def failing(self) -> str | None:
        """Why rows cannot be written now; ``None`` if they can."""
        return self._reason if self._failing_since is not None else None

    def put(self, row: UsageRow) -> asyncio.Future[None]:
        """Take a row in. The future is done when the row is in the file, or waiting for that is no use."""
        future = self._loop.create_future()
        if self._failing_since is not None:
            future.set_result(None)
        self._rows.append(row)
        self._waiting.append(future)
        self._empty.clear()
        self._work.set()
        if len(self._rows) >= self.company():
            self._all.set()
        return future

    async def run(self) -> None:
        """Write rows until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._rows:
                await self._gather()
                await self._write()

    async def flush(self, timeout: float) -> int:
        """Wait until all rows are written, for ``timeout`` seconds at most; returns how many are not.

        Those go into the log, so that even they can be booked by hand.
        """
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except asyncio.TimeoutError:
            for row in self._rows:
                log.critical("usage row not written", row=row._asdict(), reason=self._reason)
        return len(self._rows)

    async def _gather(self) -> None:
        """Wait a moment for more rows, unless all open requests have theirs here already."""
        if self._failing_since is None and len(self._rows) < min(self.company(), self._batch):
            self._all.clear()
            timer = self._loop.call_later(_GATHER, self._all.set)
            await self._all.wait()
            timer.cancel()

    async def _write(self) -> None:
        count = min(len(self._rows), self._batch)
        timer = self._loop.call_later(PATIENCE, self._late, "the database is busy")
        try:
            await usage.insert(self._database, self._rows[:count])
        except Invalid as error:
            if count > 1:  # find the one row that the database refuses, so that it takes no other with it
                self._batch = 1
                return
            log.critical("usage row refused by the database", row=self._rows[0]._asdict(), reason=str(error))
        except SmolproxyError as error:
            self._late(str(error))
            await asyncio.sleep(_RETRY)
            return
        finally:
            timer.cancel()
        self._written(count)

    def _written(self, count: int) -> None:
        done = self._waiting[:count]
        del self._rows[:count], self._waiting[:count]
        for future in done:
            if not future.done():
                future.set_result(None)
        if self._failing_since is not None:
            log.warning("usage rows are written again", seconds=round(time.monotonic() - self._failing_since, 1))
            self._failing_since = None
        if not self._rows:
            self._batch = _BATCH
            self._empty.set()

    def _late(self, reason: str) -> None:
        """Let go of all who wait: rows are not being written."""
        self._reason = reason
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = self._remind_at = now
        if now >= self._remind_at:
            self._remind_at = now + _REMIND
            log.error("usage rows wait in memory: the database cannot be written", rows=len(self._rows), reason=reason)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
