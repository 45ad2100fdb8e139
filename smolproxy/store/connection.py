"""The SQLite connection as smolproxy uses it: pragmas, schema, and a batch as one transaction.

Everything here runs in the thread that owns the connection, and blocks it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from smolproxy.errors import DatabaseError
from smolproxy.store import files, migrations

BUSY_TIMEOUT = 5.0  # seconds to wait for another process's write
_LOG_PAGES = 1000  # 4 MiB between checkpoints
_LOG_KEPT = 4 * 2**20  # bytes: what is left of the write-ahead log's file when it starts anew
_LOG_LONG = 8 * 2**20  # bytes: from here on reports let it start anew before they begin
_STEP_ASIDE = 1.0  # seconds: for how long at most
_IN_VAIN = 10.0  # seconds for which they do not do so again if it was of no use


class Connection(sqlite3.Connection):
    """A connection in autocommit mode to an existing file, migrated to the newest schema.

    :raises sqlite3.Error: the file cannot be used; DatabaseError: its schema cannot.
    """

    readonly: ClassVar[bool] = False

    def __init__(self, database: str) -> None:
        self._database = database
        self._place: files.Identity | None = None  # the files that this is a connection to, once it is one
        self._saved = False
        # A URI, so that SQLite never makes the file itself, with a mode of its own.
        uri = f"{Path(database).as_uri()}?mode=rw"
        super().__init__(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None)
        try:
            self.row_factory = sqlite3.Row
            before = files.identity(database)
            self._set_up(database)
            self._place = (before[0], *files.identity(database)[1:])  # the log is made by now
            self.execute("SELECT 1")  # fails if the file was replaced meanwhile
        except BaseException:
            self.close()
            raise

    def _set_up(self, database: str) -> None:
        version = migrations.version(self, database)  # before anything is written to a file that is not ours
        if self.readonly:
            migrations.require_current(version, database)
            self.execute("PRAGMA query_only = ON")
            return
        # Has an effect in a new file only: what is purged can be given back to the disk, see Database.shrink().
        self.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._use_wal()
        self.execute("PRAGMA synchronous = NORMAL")  # a commit survives the process; a power cut may take the last ones
        self.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        self.execute(f"PRAGMA journal_size_limit = {_LOG_KEPT}")
        self.execute("PRAGMA foreign_keys = ON")
        migrations.migrate(self, database)

    def _use_wal(self) -> None:
        # Two processes that switch a new file to WAL at once get "locked" at once: SQLite does not wait for this one.
        deadline = time.monotonic() + BUSY_TIMEOUT
        while not self._switched_to_wal(last_try=time.monotonic() > deadline):
            time.sleep(0.01)

    def _switched_to_wal(self, *, last_try: bool) -> bool:
        try:
            if self.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                # Whatever it answers: a file system without shared memory keeps the rollback journal.
                self.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if last_try or "locked" not in str(error):
                raise
            return False
        return True

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run the statement, if what it changes goes into the file that others will find.

        SQLite goes on writing into a file that has been deleted or replaced; what it writes there is lost.
        """
        if self._place is not None and (sql == "COMMIT" or not self.in_transaction):
            self._require_place()
        return super().execute(sql, parameters)

    def _require_place(self) -> None:
        if files.identity(self._database) == self._place:
            self._saved = False
            return
        if not self._saved and not self.in_transaction:
            # What only the log has goes into the file, wherever that is now: it can be put back, or kept, as a whole.
            with suppress(sqlite3.Error):
                super().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                self._saved = True
        raise sqlite3.OperationalError("the file has been deleted, moved or replaced while in use")

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Run the statement once for each of the parameters, in one transaction: all or none.

        Within an open transaction it is a part of that.
        """
        if self.in_transaction:
            return super().executemany(sql, parameters)
        self.execute("BEGIN IMMEDIATE")
        try:
            cursor = super().executemany(sql, parameters)
            self.execute("COMMIT")
        except BaseException:
            self.rollback()
            raise
        return cursor


class FailedConnection(sqlite3.Connection):
    """Stands for a connection that could not be made: every statement raises the reason."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(":memory:")
        self._reason = reason

    def execute(self, *_: Any) -> sqlite3.Cursor:
        """Raise the reason."""
        raise self._reason


class ReadonlyConnection(Connection):
    """The same for short questions: needs the newest schema and refuses to write."""

    readonly = True

    def _require_place(self) -> None:
        """Reading goes on in a file that was deleted or replaced, until all connections are opened anew."""


class ReportConnection(ReadonlyConnection):
    """The same for reports, which may take long.

    SQLite starts its write-ahead log anew only in a moment when nobody reads from it. Reports without a pause, or one
    after the other, would let it grow for ever; so each lets such a moment come when the log is long.
    """

    def __init__(self, database: str) -> None:
        self._log = Path(f"{database}-wal")
        self._in_vain_until = 0.0  # another program is in the way: not every report need find that out
        super().__init__(database)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run the statement, after having stepped aside if need be."""
        if self._log_is_long() and time.monotonic() > self._in_vain_until:
            self._step_aside()
        return super().execute(sql, parameters)

    def _log_is_long(self) -> bool:
        try:
            return self._log.stat().st_size > _LOG_LONG
        except OSError:  # there is none, or it is out of reach: then reading will tell
            return False

    def _step_aside(self) -> None:
        deadline = time.monotonic() + _STEP_ASIDE
        self._wait_for_others(0)
        try:
            while self._log_is_long() and time.monotonic() < deadline:
                # A process that writes does it by itself as soon as nobody reads; this is for when none does. It must
                # not wait for locks: the one that it holds while waiting would be in the writer's way.
                with suppress(sqlite3.OperationalError):
                    super().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                time.sleep(0.01)
            if self._log_is_long():
                self._in_vain_until = time.monotonic() + _IN_VAIN
        finally:
            self._wait_for_others(BUSY_TIMEOUT)

    def _wait_for_others(self, seconds: float) -> None:
        super().execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def require_database(database: str) -> None:
    """Look into a file without becoming one of its users: no lock, no write-ahead log.

    :raises sqlite3.Error: it is no database; DatabaseError: it is not one that has been smolproxy's already.
    """
    looking = sqlite3.connect(f"{Path(database).as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    try:
        if not migrations.version(looking, database):
            raise DatabaseError(f"{database} is empty")
    finally:
        looking.close()


def writing(database: str, **_: Any) -> sqlite3.Connection:
    """Open for reading and writing: a factory for ``sqlite3.connect`` that never raises, see :class:`FailedConnection`.

    What becomes of the thread whose connection cannot be made differs between versions of aiosqlite, and in the newest
    it may outlive the event loop. Nothing of that happens to one that is made, and closed.
    """
    return _made(Connection, database)


def reading(database: str, **_: Any) -> sqlite3.Connection:
    """Open for short questions; otherwise the same."""
    return _made(ReadonlyConnection, database)


def reporting(database: str, **_: Any) -> sqlite3.Connection:
    """Open for reports; otherwise the same."""
    return _made(ReportConnection, database)


def _made(kind: type[Connection], database: str) -> sqlite3.Connection:
    try:
        return kind(database)
    except Exception as error:
        return FailedConnection(error)
