"""The books: one row per request, totals kept in the same transaction, reports over both.

This module owns the rows of ``usage``; the totals are written by triggers of the schema and outlive the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Any, NamedTuple

from smolproxy.errors import Invalid
from smolproxy.store import totals
from smolproxy.store.database import Database


class UsageRow(NamedTuple):
    """One finished request, in the order of the table's columns.

    Token counts are never None (0 where nothing was told); of the times in milliseconds, those that are not known are.
    """

    created_at: int  # when the request came, Unix time in milliseconds
    request_id: str
    key_id: int
    server_id: int | None
    model_name: str  # as asked
    real_model_name: str
    endpoint: str
    stream: bool
    status: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_source: str
    prompt_ms: float | None
    predicted_ms: float | None
    ttft_ms: float | None
    duration_ms: float


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which requests a report is about; None leaves a field open."""

    key_id: int | None = None
    server_id: int | None = None
    model: str | None = None  # matches the asked or the real name
    since: int | None = None  # Unix time in milliseconds, inclusive
    until: int | None = None  # exclusive


_MOST_AT_ONCE = 64  # rows of one statement: bounds the texts that the connection keeps prepared
_VALUES = f"({', '.join('?' * len(UsageRow._fields))})"
_INSERT = f"INSERT INTO usage ({', '.join(UsageRow._fields)}) VALUES "  # noqa: S608 - names of this file
_LOGS = """
    SELECT usage.id, usage.created_at, request_id, key_id, keys.name AS user_name, server_id,
           servers.name AS server_name, model_name, real_model_name, endpoint, stream, status, outcome, prompt_tokens,
           cached_tokens, completion_tokens, prompt_tokens + completion_tokens AS total_tokens, tokens_source,
           prompt_ms, predicted_ms, ttft_ms, duration_ms
    FROM page JOIN usage ON usage.id = page.id
    LEFT JOIN keys ON keys.id = key_id LEFT JOIN servers ON servers.id = server_id
    ORDER BY usage.created_at DESC, usage.id DESC
"""


async def insert(db: Database, rows: Sequence[UsageRow]) -> None:
    """Write the rows and their totals in one transaction and one hop to the connection's thread.

    :raises Invalid: a row cannot be stored; DatabaseError: the file cannot be written. Either way none was.
    """
    if len(rows) > _MOST_AT_ONCE:
        await db.execute_many(_INSERT + _VALUES, rows)
    elif rows:
        # One statement: the thread lets go of the interpreter at each one that it runs, and then has to wait for a
        # busy event loop to get it back.
        await db.fetch_all(_INSERT + ", ".join([_VALUES] * len(rows)), [*chain.from_iterable(rows)])


async def logs(db: Database, where: UsageFilter, *, limit: int = 100, offset: int = 0) -> list[dict[str, Any]]:
    """Return rows, newest first, as dicts with the field names of a ``logs`` row.

    :raises Invalid: a negative limit or offset.
    """
    if limit < 0 or offset < 0:
        raise Invalid("limit and offset must not be negative")
    # The page is found by an index alone; names and numbers are looked up for the rows of this page only.
    selects, parameters = _matching(where)
    page = ["WITH page AS (", " UNION ALL ".join(selects), "ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?)"]
    found = await db.fetch_all(" ".join((*page, _LOGS)), (*parameters, limit, offset))
    return [{**dict(row), "created_at": iso(row["created_at"]), "stream": bool(row["stream"])} for row in found]


async def summary(db: Database, where: UsageFilter) -> list[dict[str, Any]]:
    """Return ``summary`` rows: totals by key, asked and real model, in that order.

    From the totals, and from the rows of the hours that since and until cut: of those hours, purged rows are missing.
    """
    return await summary_by(db, where, ("key", "model"))


async def summary_by(db: Database, where: UsageFilter, by: Sequence[str]) -> list[dict[str, Any]]:
    """Return totals grouped, and ordered, by any of ``key``, ``model``, ``server``, ``day``, ``hour``.

    Each row has the fields of its groups and the five totals. Days and hours are UTC, ISO 8601 (``2026-11-30``,
    ``2026-11-30T12:00:00Z``).

    :raises Invalid: no group, an unknown one, or one given twice.
    """
    unknown = sorted(set(by) - set(totals.GROUPS))
    if unknown or not by or len(set(by)) < len(by):
        wrong = f"{unknown[0]!r} is not one of them" if unknown else "each at most once, at least one"
        raise Invalid(f"group by any of {', '.join(totals.GROUPS)}: {wrong}")
    fields = tuple(field for group in by for field in totals.GROUPS[group])
    return await _totals(db, where, fields)


async def summary_real(db: Database) -> list[dict[str, Any]]:
    """Return totals of all time grouped by real model and server: ``real_model_name, server_id, server_name``."""
    return await _totals(db, UsageFilter(), ("real_model_name", "server_id", "server_name"))


async def purge(db: Database, before: int, *, batch: int = 2000) -> int:
    """Delete up to ``batch`` of the oldest rows from before a Unix time in milliseconds; totals stay.

    :return: how many rows were deleted: fewer than ``batch`` when there are no more.
    """
    return await db.execute_many(
        """
        DELETE FROM usage WHERE id IN (
            SELECT id FROM usage WHERE created_at < ? ORDER BY created_at LIMIT ?
        )
        """,
        [(before, batch)],
    )


def iso(milliseconds: int) -> str:
    """Return a Unix time in milliseconds as ISO 8601 in UTC: ``2026-11-30T12:00:00.123Z``."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


def _matching(where: UsageFilter) -> tuple[list[str], list[Any]]:
    """SELECTs of the matching ids, to be united, with their parameters.

    Each is led to one index in the order of the log: without statistics SQLite would choose by the number of terms.
    A unary plus keeps a term out of that choice.
    """
    rest: list[tuple[str, list[Any]]] = []
    if where.server_id is not None:
        plain = where.key_id is None and where.model is None
        rest.append(("server_id = ?" if plain else "+server_id = ?", [where.server_id]))
    if where.since is not None:
        rest.append(("created_at >= ?", [where.since]))
    if where.until is not None:
        rest.append(("created_at < ?", [where.until]))
    leading: list[tuple[str, list[Any]]]
    if where.key_id is not None:
        leading = [("key_id = ?", [where.key_id])]
        if where.model is not None:
            rest.append(("? IN (+model_name, +real_model_name)", [where.model]))
    elif where.model is not None:
        leading = [
            ("real_model_name = ?", [where.model]),
            ("model_name = ? AND model_name <> real_model_name", [where.model]),
        ]
    else:
        leading = [("true", [])]
    selects = []
    parameters: list[Any] = []
    for first in leading:
        terms = [first, *rest]
        selects.append(" ".join(("SELECT id, created_at FROM usage WHERE", " AND ".join(term for term, _ in terms))))
        parameters += [value for _, values in terms for value in values]
    return selects, parameters


async def _totals(db: Database, where: UsageFilter, fields: Sequence[str]) -> list[dict[str, Any]]:
    terms: list[str] = []
    values: list[Any] = []
    if where.key_id is not None:
        terms.append("key_id = ?")
        values.append(where.key_id)
    if where.server_id is not None:
        terms.append("server_id = nullif(?, 0)")  # in the totals, 0 is no server
        values.append(where.server_id)
    if where.model is not None:
        terms.append("? IN (model_name, real_model_name)")
        values.append(where.model)
    sql, parameters = totals.query(fields, terms, values, where.since, where.until)
    return [dict(row) for row in await db.fetch_all(sql, parameters)]
