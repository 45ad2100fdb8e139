"""Reports from totals: which table answers for which part of a stretch of time, and the SQL of it.

A stretch is made of whole days (``usage_daily``), whole hours left and right of them (``usage_hourly``), and what is
left of an hour that its ends cut (the rows themselves). This module makes SQL; it runs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HOUR = 3_600_000  # milliseconds
_COUNTS = {
    "request_count": "request_count",
    "total_prompt_tokens": "prompt_tokens",
    "total_cached_tokens": "cached_tokens",
    "total_completion_tokens": "completion_tokens",
    "total_all_tokens": "prompt_tokens + completion_tokens",
}

# What a report can be grouped by -> the fields of its rows.
GROUPS = {
    "key": ("key_id", "key_name"),
    "model": ("model_name", "real_model_name"),
    "server": ("server_id", "server_name"),
    "day": ("day",),
    "hour": ("hour",),
}

# field -> (what is grouped by, how it is shown). Names are looked up for the groups, not for what is summed.
_FIELDS = {
    "key_id": ("key_id", "part.key_id"),
    "key_name": ("", "(SELECT name FROM keys WHERE id = part.key_id)"),
    "server_id": ("server_id", "nullif(part.server_id, 0)"),
    "server_name": ("", "(SELECT name FROM servers WHERE id = part.server_id)"),
    "model_name": ("model_name", "part.model_name"),
    "real_model_name": ("real_model_name", "part.real_model_name"),
    "day": ("hour / 24", "strftime('%Y-%m-%d', part.day * 86400, 'unixepoch')"),
    "hour": ("hour", "strftime('%Y-%m-%dT%H:%M:%SZ', part.hour * 3600, 'unixepoch')"),
}

_COLUMNS = (
    "key_id, server_id, model_name, real_model_name, request_count, prompt_tokens, cached_tokens, completion_tokens"
)
_ROWS = """
    SELECT created_at / 3600000 AS hour, key_id, ifnull(server_id, 0) AS server_id, model_name, real_model_name,
           1 AS request_count, prompt_tokens, cached_tokens, completion_tokens
    FROM usage
"""
_HOURS = f"SELECT hour, {_COLUMNS} FROM usage_hourly"  # noqa: S608 - constants
_DAYS = f"SELECT day * 24 AS hour, {_COLUMNS} FROM usage_daily"  # noqa: S608 - constants

Stretch = tuple["int | None", "int | None"]  # from, inclusive, to, exclusive; None: open


def query(
    fields: Sequence[str], terms: Sequence[str], values: Sequence[Any], since: int | None, until: int | None
) -> tuple[str, list[Any]]:
    """Return the SQL, and its parameters, of the totals between two Unix times in milliseconds, grouped by fields.

    :param fields: names of the fields of :data:`GROUPS`, in the order of the result's columns and rows.
    :param terms: conditions on the columns of the totals, with a ``?`` for each of the values.
    """
    groups = {field: expression for field in fields if (expression := _FIELDS[field][0])}
    sources, parameters = _sources(terms, values, since, until, by_hour="hour" in fields)
    if not sources:
        sources = [f"{_ROWS} WHERE false"]  # an empty stretch: no groups, hence no rows
    columns = [f"{expression} AS {field}" for field, expression in groups.items()]
    columns += [f"sum({expression}) AS {name}" for name, expression in _COUNTS.items()]
    shown = [*(f"{_FIELDS[field][1]} AS {field}" for field in fields), *(f"part.{name}" for name in _COUNTS)]
    sql = (
        f"SELECT {', '.join(shown)} FROM ("  # noqa: S608 - made of constants of this file and `terms`
        f"SELECT {', '.join(columns)} FROM ({' UNION ALL '.join(sources)}) GROUP BY {', '.join(groups.values())}"
        f") AS part ORDER BY {', '.join(f'part.{field}' for field in groups)}"
    )
    return sql, parameters


def _sources(
    terms: Sequence[str], values: Sequence[Any], since: int | None, until: int | None, *, by_hour: bool
) -> tuple[list[str], list[Any]]:
    hours, cut = _split((since, until), _HOUR)
    days: list[Stretch] = []
    if not by_hour:
        whole, hours_beside = [], []
        for stretch in hours:
            middle, ends = _split(stretch, 24)
            whole += middle
            hours_beside += ends
        days, hours = whole, hours_beside
    sources = []
    parameters: list[Any] = []
    for select, column, stretches in (
        (_DAYS, "day", days),
        (_HOURS, "hour", hours),
        (_ROWS, "created_at", cut),
    ):
        for start, end in stretches:
            bounds = [(f"{column} >= ?", start), (f"{column} < ?", end)]
            used = [(term, value) for term, value in bounds if value is not None]
            conditions = " AND ".join([*(term for term, _ in used), *terms]) or "true"
            sources.append(f"{select} WHERE {conditions}")
            parameters += [*(value for _, value in used), *values]
    return sources, parameters


def _split(stretch: Stretch, unit: int) -> tuple[list[Stretch], list[Stretch]]:
    """Return the whole units within a stretch, counted in units, and what is left at its ends, counted as given."""
    start, end = stretch
    if start is not None and end is not None and start >= end:
        return [], []
    first = None if start is None else -(-start // unit)
    last = None if end is None else end // unit
    if first is not None and last is not None and first > last:
        return [], [stretch]  # within one unit
    ends: list[Stretch] = []
    if start is not None and first is not None and start < first * unit:
        ends.append((start, first * unit))
    if end is not None and last is not None and last * unit < end:
        ends.append((last * unit, end))
    return ([] if first is not None and first == last else [(first, last)]), ends
