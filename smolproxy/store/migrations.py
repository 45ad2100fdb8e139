"""The schema, as numbered steps: step N brings a file from schema N-1 to schema N, in one transaction.

A step that has been released is never edited: a change of the schema is a new step. The number of the last step taken
is the file's ``user_version``; ``application_id`` tells that the file is smolproxy's at all. Points in time are
Unix time in milliseconds, UTC.

What is deleted by an administrator stays as a row with ``deleted_at``, without its secrets, so that usage rows need
to carry ids only and reports still tell the name.
"""

from __future__ import annotations

import sqlite3

from smolproxy.errors import DatabaseError

APPLICATION_ID = 0x736D6F6C  # "smol"

_TABLES = (
    """
    CREATE TABLE keys (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        hash TEXT UNIQUE,  -- SHA-256 in hex; null once deleted
        prefix TEXT NOT NULL,
        active INTEGER NOT NULL DEFAULT 1,
        created_at INTEGER NOT NULL,
        deleted_at INTEGER,
        rpm_limit INTEGER,
        tpm_limit INTEGER,
        parallel_limit INTEGER,
        budget INTEGER,
        budget_period TEXT,
        models TEXT,  -- a JSON array
        expires_at INTEGER,
        max_tokens INTEGER,
        priority INTEGER
    )
    """,
    """
    CREATE TABLE servers (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        url TEXT NOT NULL,
        api_key TEXT,
        active INTEGER NOT NULL DEFAULT 1,
        listed INTEGER NOT NULL DEFAULT 0,  -- its models are those of server_models, even if there are none
        slots INTEGER,
        created_at INTEGER NOT NULL,
        deleted_at INTEGER
    )
    """,
    "CREATE UNIQUE INDEX servers_name ON servers (name) WHERE deleted_at IS NULL",
    """
    CREATE TABLE server_models (
        server_id INTEGER NOT NULL REFERENCES servers (id),
        model_name TEXT NOT NULL,
        position INTEGER NOT NULL,
        PRIMARY KEY (server_id, model_name)
    ) WITHOUT ROWID
    """,
    "CREATE TABLE aliases (alias_name TEXT PRIMARY KEY NOT NULL, real_model_name TEXT NOT NULL) WITHOUT ROWID",
)

# No foreign keys: the books take what happened, whatever the other tables say by now.
_USAGE = (
    """
    CREATE TABLE usage (
        id INTEGER PRIMARY KEY,
        created_at INTEGER NOT NULL CHECK (created_at BETWEEN 0 AND 253402300799999),  -- up to the year 9999
        request_id TEXT NOT NULL,
        key_id INTEGER NOT NULL,
        server_id INTEGER,
        model_name TEXT NOT NULL,
        real_model_name TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        stream INTEGER NOT NULL,
        status INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        tokens_source TEXT NOT NULL,
        prompt_ms REAL,
        predicted_ms REAL,
        ttft_ms REAL,
        duration_ms REAL NOT NULL
    )
    """,
    # One index per filter of the log, each in the log's order; the first serves purging too. The names as asked are
    # indexed only where they are aliases: elsewhere the real name finds the row.
    "CREATE INDEX usage_time ON usage (created_at)",
    "CREATE INDEX usage_key ON usage (key_id, created_at)",
    "CREATE INDEX usage_server ON usage (server_id, created_at)",
    "CREATE INDEX usage_model ON usage (real_model_name, created_at)",
    "CREATE INDEX usage_alias ON usage (model_name, created_at) WHERE model_name <> real_model_name",
)


def _totals(table: str, unit: str, milliseconds: int) -> tuple[str, str]:
    """A table of totals per unit of time, and the trigger that keeps it in the transaction of each row.

    A request without a server counts under server 0: null would not be equal to itself in the primary key.
    """
    return (
        f"""
        CREATE TABLE {table} (
            {unit} INTEGER NOT NULL,  -- since 1970, UTC
            key_id INTEGER NOT NULL,
            server_id INTEGER NOT NULL,
            model_name TEXT NOT NULL,
            real_model_name TEXT NOT NULL,
            request_count INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            PRIMARY KEY ({unit}, key_id, server_id, model_name, real_model_name)
        ) WITHOUT ROWID
        """,
        f"""
        CREATE TRIGGER {table}_insert AFTER INSERT ON usage BEGIN
            INSERT INTO {table} VALUES (
                NEW.created_at / {milliseconds}, NEW.key_id, ifnull(NEW.server_id, 0), NEW.model_name,
                NEW.real_model_name, 1, NEW.prompt_tokens, NEW.cached_tokens, NEW.completion_tokens
            )
            ON CONFLICT ({unit}, key_id, server_id, model_name, real_model_name) DO UPDATE SET
                request_count = request_count + 1,
                prompt_tokens = prompt_tokens + excluded.prompt_tokens,
                cached_tokens = cached_tokens + excluded.cached_tokens,
                completion_tokens = completion_tokens + excluded.completion_tokens;
        END
        """,  # noqa: S608 - constants of this file
    )


def _revision(name: str, *tables: str) -> tuple[str, ...]:
    """A counter that goes up with every change of these tables."""
    return (
        f"INSERT INTO revisions VALUES ('{name}', 0)",  # noqa: S608 - constants of this file
        *(
            f"""
            CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN
                UPDATE revisions SET value = value + 1 WHERE name = '{name}';
            END
            """  # noqa: S608 - constants of this file
            for table in tables
            for event in ("INSERT", "UPDATE", "DELETE")
        ),
    )


STEPS: tuple[tuple[str, ...], ...] = (
    (
        *_TABLES,
        *_USAGE,
        *_totals("usage_hourly", "hour", 3_600_000),
        *_totals("usage_daily", "day", 86_400_000),
        "CREATE TABLE revisions (name TEXT PRIMARY KEY NOT NULL, value INTEGER NOT NULL) WITHOUT ROWID",
        *_revision("keys", "keys"),
        *_revision("routes", "servers", "server_models", "aliases"),
        f"PRAGMA application_id = {APPLICATION_ID}",
    ),
)


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Take the steps that the file has not seen yet. Safe when several processes do so at once.

    :param connection: in autocommit mode (``isolation_level=None``).
    :raises DatabaseError: the schema is newer than the program, or the file is another program's.
    """
    while version(connection, path) < len(STEPS):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Asked again: another process may have taken the step while this one waited for the lock.
            number = _checked(_header(connection), path)
            for step in STEPS[number : number + 1]:
                for statement in step:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            connection.rollback()
            raise


def require_current(number: int, path: str) -> None:
    """Raise DatabaseError unless this is the newest schema."""
    if number < len(STEPS):
        raise DatabaseError(f"database {path} has schema {number}, older than {len(STEPS)}: open it for writing once")


def version(connection: sqlite3.Connection, path: str) -> int:
    """Return the number of the file's schema, 0 for a new file.

    :raises DatabaseError: it is newer than the program, or the file is another program's.
    """
    connection.execute("BEGIN")  # one view of all, while another process may be at its migration
    try:
        header = _header(connection)
    finally:
        connection.rollback()
    return _checked(header, path)


def _header(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Number of the schema, application, number of tables and other things in the schema."""
    questions = ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
    number, application, things = (int(connection.execute(question).fetchone()[0]) for question in questions)
    return number, application, things


def _checked(header: tuple[int, int, int], path: str) -> int:
    number, application, things = header
    if number > len(STEPS):
        raise DatabaseError(
            f"database schema {number} of {path} is newer than this program knows ({len(STEPS)}): upgrade smolproxy"
        )
    if application != APPLICATION_ID if number else things:
        raise DatabaseError(f"{path} is a SQLite database, but not one of smolproxy's")
    return number
