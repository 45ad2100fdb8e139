"""The database as the program sees it: open, ask, change, close, from an event loop.

This module owns the connection's thread, its turns and the translation of SQLite's errors. What is asked stands in the
modules of the nouns: keys, servers, aliases, usage.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiosqlite

from smolproxy.errors import DatabaseError, Invalid, SmolproxyError
from smolproxy.store import connection, files

# What SQLite and its binding raise for the values they are given, as opposed to the file.
_DATA_ERRORS = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    OverflowError,  # an integer beyond 64 bits
    UnicodeEncodeError,  # a lone surrogate
)


class Database:
    """One connection to the SQLite file, its thread included. Several may be open at once in one process.

    Not for sharing between event loops. No method ever raises ``sqlite3.Error``: it is DatabaseError when the file
    cannot be used (or has been closed), Invalid when the values cannot be stored.
    """

    path: Path

    def __init__(self, path: Path, real: Path, factory: Callable[..., sqlite3.Connection]) -> None:
        """For :meth:`open`."""
        self.path = path
        self._real = real
        self._factory = factory
        self._open_connection: aiosqlite.Connection | None = None
        self._identity: files.Identity = ()
        self._lock = asyncio.Lock()  # one turn at a time: no statement of another task gets into a transaction
        self._owner: asyncio.Task[Any] | None = None  # the task that has a transaction open

    @classmethod
    async def open(cls, path: Path | str, *, readonly: bool = False, brief: bool = False) -> Database:
        """Open, making folder (0700) and file (0600) when missing, and migrate to the newest schema.

        :param readonly: for reports: the file must exist and be migrated; writing is refused.
        :param brief: and what is read never takes long: it need not give way to the write-ahead log.
        :raises DatabaseError: names path and user when not permitted, says so when it is no database or another
            program's, and refuses a schema newer than the program.
        """
        path = Path(path)
        real = files.prepare(path, create=not readonly)
        reading = connection.reading if brief else connection.reporting
        database = cls(path, real, reading if readonly else connection.writing)
        await database._begin()
        return database

    async def _begin(self) -> None:
        opened = _daemonic(str(self._real), self._factory)
        opening = asyncio.ensure_future(_begin(opened))
        with _explained(self.path):
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                # The thread is at work and will report to this loop: see it through, then close.
                with suppress(sqlite3.Error, DatabaseError):
                    await opening
                    await opened.close()
                raise
        self._open_connection = opened
        self._identity = files.identity(self._real)

    async def shrink(self, pages: int) -> bool:
        """Give up to so many free pages of the file back to the disk; return whether there are more."""
        await self.fetch_all(f"PRAGMA incremental_vacuum({int(pages)})")
        return bool(
            (await self.fetch_all("PRAGMA auto_vacuum"))[0][0] and (await self.fetch_all("PRAGMA freelist_count"))[0][0]
        )

    @property
    def log_size(self) -> int:
        """Bytes of the write-ahead log's file."""
        return files.log_size(self._real)

    def place(self) -> str:
        """Tell what is where the opened file was: ``here`` it is, ``gone``, or ``replaced`` by another."""
        now = files.identity(self._real)
        if now[0] is None:
            return "gone"
        return "here" if now == self._identity else "replaced"

    @staticmethod
    async def reopen(databases: Sequence[Database]) -> None:
        """Open a process's connections to one file anew, on the file that is in its place now.

        No other connection of this process may be open. What they are asked for meanwhile waits.

        :raises DatabaseError: that one cannot be used: the old ones stay, as far as they are not closed yet.
        """
        first = databases[0]
        async with AsyncExitStack() as turns:
            for each in databases:
                await turns.enter_async_context(each._turn())
            was, now = first._identity, files.identity(first._real)
            if was[:1] != now[:1]:
                with _explained(first.path):
                    await asyncio.to_thread(connection.require_database, str(first._real))
            # All are closed before one is opened: SQLite shares what it knows of a file within the process.
            for each in databases:
                await each.close()
            files.remove_companions(first._real, was)
            for each in databases:
                each._identity = ()
                await each._begin()

    async def close(self) -> None:
        """Close, after everything that has been asked before; idempotent."""
        opened, self._open_connection = self._open_connection, None
        if opened is not None:
            with _explained(self.path):
                await opened.close()

    async def data_version(self) -> int:
        """Return a number that changes when another connection has changed the file."""
        return int((await self.fetch_all("PRAGMA data_version"))[0][0])

    async def revisions(self) -> tuple[int, int]:
        """Return (keys, routes): counters that go up with every change of keys, and of servers, models and aliases."""
        rows = await self.fetch_all("SELECT value FROM revisions WHERE name IN ('keys', 'routes') ORDER BY name")
        return rows[0][0], rows[1][0]

    async def fetch_all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run one statement, a writing one too, and return its rows (``sqlite3.Row``), in one hop to the thread."""
        async with self._turn():
            return await self._run(sql, parameters)

    async def insert_row(self, sql: str, parameters: Sequence[Any]) -> int:
        """Insert one row and return its id."""
        async with self._turn():
            with _explained(self.path):
                row = await self._connection.execute_insert(sql, parameters)
        assert row is not None  # noqa: S101,RUF100 - last_insert_rowid() always answers
        return int(row[0])

    async def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run the statement for each of the rows, all or none, in one hop; return how many rows were changed.

        Once it is this call's turn, cancelling it does not take the rows back.
        """
        async with self._turn():
            with _explained(self.path):
                cursor = await self._connection.executemany(sql, rows)
        return cursor.rowcount

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK on an exception; one at a time on this connection.

        It belongs to the task that opened it: whatever other tasks ask of this connection waits until it has ended.
        Within another transaction of the same task it is a part of that, undone alone on an exception.
        """
        task = asyncio.current_task()
        if self._owner is task:
            async with self._steps("SAVEPOINT nested", "RELEASE nested", "ROLLBACK TO nested; RELEASE nested"):
                yield
            return
        async with self._lock:
            self._owner = task
            try:
                async with self._steps("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
                    yield
            finally:
                self._owner = None

    @asynccontextmanager
    async def _steps(self, begin: str, commit: str, rollback: str) -> AsyncIterator[None]:
        try:
            await self._run(begin)
            yield
            await self._run(commit)
        except BaseException:
            # Also when cancelled while the thread was still at `begin` or `commit`: these are queued behind it. SQLite
            # may have rolled back by itself, or committed; then there is nothing left to undo.
            for statement in rollback.split("; "):
                with suppress(SmolproxyError):
                    await self._run(statement)
            raise

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the transaction of another task to end."""
        if self._owner is asyncio.current_task():
            yield
        else:
            async with self._lock:
                yield

    async def _run(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with _explained(self.path):
            return list(await self._connection.execute_fetchall(sql, parameters))

    @property
    def _connection(self) -> aiosqlite.Connection:
        if self._open_connection is None:
            raise DatabaseError(f"database {self.path} is closed")
        return self._open_connection


def _daemonic(path: str, factory: Callable[..., sqlite3.Connection]) -> aiosqlite.Connection:
    """Return a connection, still to be opened, whose thread does not keep the interpreter from exiting.

    The thread object is the library's own, in some versions out of reach; but a thread made by a daemon thread is one.
    """
    made: list[aiosqlite.Connection] = []
    maker = threading.Thread(target=lambda: made.append(aiosqlite.connect(path, factory=factory)), daemon=True)
    maker.start()
    maker.join()
    return made[0]


async def _begin(opened: aiosqlite.Connection) -> None:
    await opened
    try:
        await opened.execute_fetchall("SELECT 1")  # raises what kept it from being opened
    except BaseException:
        await opened.close()
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Translate what SQLite raises; the one place that does."""
    try:
        yield
    except _DATA_ERRORS as error:
        raise Invalid(f"the database does not take these values: {error}") from error
    except sqlite3.Error as error:
        raise DatabaseError(_message(path, str(error))) from error


def _message(path: Path, reason: str) -> str:
    if "not a database" in reason:
        return f"{path} is not a SQLite database"
    if "unable to open" in reason:
        return f"cannot open database {path} as user {files.user()}: {reason}"
    if "readonly" in reason:
        return f"cannot write database {path} as user {files.user()}: {reason}"
    return f"database {path}: {reason}"
