"""The law of the totals: a report from them equals a recount of the rows, whatever stretch of time it is about."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smolproxy.store import totals, usage
from smolproxy.store.database import Database
from smolproxy.store.usage import UsageFilter, UsageRow
from test_store.rows import DAY, HOUR, NOON, ROW

# Three days, with the edges of hours and days well represented.
START = NOON - 36 * HOUR
EDGES = st.builds(lambda hour, off: START + hour * HOUR + off, st.integers(0, 72), st.sampled_from([-1, 0, 1]))
MOMENTS = st.one_of(EDGES, st.integers(START, START + 3 * DAY))
ROWS = st.builds(
    lambda created_at, key_id, server_id, names, tokens: ROW._replace(
        created_at=created_at,
        key_id=key_id,
        server_id=server_id,
        model_name=names[0],
        real_model_name=names[1],
        prompt_tokens=tokens[0],
        cached_tokens=tokens[1],
        completion_tokens=tokens[2],
    ),
    MOMENTS,
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([("m", "m"), ("fast", "m"), ("n", "n"), ("fast", "n")]),
    st.tuples(*[st.integers(0, 2**40)] * 3),
)
WHERE = st.builds(
    UsageFilter,
    key_id=st.sampled_from([None, None, 1, 4]),
    server_id=st.sampled_from([None, None, 1, 2]),
    model=st.sampled_from([None, None, "m", "fast", "x"]),
    since=st.none() | MOMENTS,
    until=st.none() | MOMENTS,
)
BY = st.lists(st.sampled_from(sorted(totals.GROUPS)), unique=True, min_size=1)


def group(row: UsageRow, by: list[str]) -> tuple[Any, ...]:
    moment = datetime.fromtimestamp(row.created_at // 1000, timezone.utc)
    fields = {
        "key": (row.key_id, None),
        "model": (row.model_name, row.real_model_name),
        "server": (row.server_id, None),
        "day": (f"{moment:%Y-%m-%d}",),
        "hour": (f"{moment:%Y-%m-%dT%H:00:00Z}",),
    }
    return tuple(value for name in by for value in fields[name])


def recount(rows: list[UsageRow], where: UsageFilter, by: list[str]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for row in rows:
        if (
            where.key_id in (None, row.key_id)
            and where.server_id in (None, row.server_id)
            and where.model in (None, row.model_name, row.real_model_name)
            and (where.since is None or row.created_at >= where.since)
            and (where.until is None or row.created_at < where.until)
        ):
            counts = (1, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
            for index, count in enumerate((*counts, row.prompt_tokens + row.completion_tokens)):
                sums[group(row, by)][index] += count
    return {key: tuple(values) for key, values in sums.items()}


@settings(deadline=None)
@given(st.lists(ROWS, max_size=30), st.lists(st.tuples(WHERE, BY), min_size=1, max_size=8))
@example([ROW._replace(created_at=START + hour * HOUR) for hour in range(73)], [(UsageFilter(), ["hour"])])
def test_a_report_equals_a_recount_of_the_rows(
    rows: list[UsageRow], reports: list[tuple[UsageFilter, list[str]]]
) -> None:
    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            db = await Database.open(Path(folder) / "proxy.db")
            try:
                half = len(rows) // 2
                await usage.insert(db, rows[:half])
                await usage.insert(db, rows[half:])
                for where, by in reports:
                    found = await usage.summary_by(db, where, by)
                    counted = {tuple(row.values())[:-5]: tuple(row.values())[-5:] for row in found}
                    assert len(counted) == len(found)
                    assert counted == recount(rows, where, by)
                    keys = [tuple((value is not None, value) for value in key) for key in counted]
                    assert keys == sorted(keys)
                    assert await usage.summary(db, where) == await usage.summary_by(db, where, ["key", "model"])
            finally:
                await db.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("since", "until", "tables"),
    [
        (None, None, ["usage_daily"]),
        (START, START + 3 * DAY, ["usage_daily"]),  # from midnight to midnight
        (START + HOUR, None, ["usage_daily", "usage_hourly"]),
        (START + HOUR, START + 5 * HOUR, ["usage_hourly"]),
        (START + 1, START + 5 * HOUR, ["usage_hourly", "usage"]),
        (START + 1, START + 2, ["usage"]),
        (START, START, ["usage"]),
    ],
)
def test_each_part_of_a_stretch_is_answered_by_the_coarsest_table(
    since: int | None, until: int | None, tables: list[str]
) -> None:
    sql, _ = totals.query(["key_id"], [], [], since, until)
    used = [table for table in ("usage_daily", "usage_hourly", "usage") if f"FROM {table} " in sql.replace("\n", " ")]
    assert used == tables


def test_hours_are_not_answered_by_days() -> None:
    sql, _ = totals.query(["hour"], [], [], None, None)
    assert "usage_daily" not in sql
