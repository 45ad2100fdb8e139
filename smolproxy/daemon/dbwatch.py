"""The database file under the running daemon: whether it is still there, and what is done when it is not.

SQLite goes on with a file that has been deleted, moved or replaced while in use, and what it writes is lost. The store
refuses to write then, so that usage rows wait in the ledger. This module says so loudly. A file that is moved back is
gone on with; when there is another database in the place, such as a backup, all connections are opened anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from smolproxy.daemon.directory import POLL, Directory
from smolproxy.daemon.reports import Reports
from smolproxy.errors import SmolproxyError
from smolproxy.store.database import Database

log = structlog.get_logger("smolproxy")

LONG_LOG = 64 * 2**20
"""Bytes of the write-ahead log from which on there is a warning."""


class DatabaseWatch:
    """Looks after the file twice a second.

    :param databases: all connections that are held open; the first one writes.
    :param reports: opens another one when it needs it.
    :param directory: told to load everything anew from another database.
    """

    def __init__(self, databases: Sequence[Database], reports: Reports, directory: Directory) -> None:
        self.failing: str | None = None
        self._databases = databases
        self._reports = reports
        self._directory = directory
        self._long_log = False

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(POLL)
            await self._look()

    async def _look(self) -> None:
        first = self._databases[0]
        place = first.place()
        if place == "here":
            self._watch_log(first.log_size)
            if self.failing is not None:
                log.warning("the database file is back", path=str(first.path))
                self.failing = None
            return
        if self.failing is None:
            self._fail(f"{first.path} has been deleted, moved or replaced while in use")
            with suppress(SmolproxyError):  # it refuses, and saves what only the write-ahead log has
                await first.data_version()
        if place == "replaced":
            await self._reopen()

    async def _reopen(self) -> None:
        try:
            await self._reports.close()
            await Database.reopen(self._databases)
            await self._directory.reload()
        except SmolproxyError as error:
            if str(error) != self.failing:
                self._fail(str(error))
            return
        self.failing = None
        log.warning("the database file has been opened anew", path=str(self._databases[0].path))

    def _fail(self, reason: str) -> None:
        self.failing = reason
        log.error("the database file is not in its place", reason=reason)

    def _watch_log(self, size: int) -> None:
        """Some other program may keep a transaction open for long: then SQLite cannot start its log anew."""
        if size > LONG_LOG and not self._long_log:
            log.warning("the write-ahead log is long: does another program keep reading?", mib=size // 2**20)
        self._long_log = size > LONG_LOG
