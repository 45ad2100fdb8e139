"""The books: what is written together, what is found again, what purging leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smolproxy.errors import Invalid
from smolproxy.store import keys, servers, usage
from smolproxy.store.database import Database
from smolproxy.store.usage import UsageFilter, UsageRow
from test_store.rows import HOUR, NOON, ROW

EVERYTHING = UsageFilter()


async def ids(db: Database, where: UsageFilter = EVERYTHING, **page: int) -> list[int]:
    return [row["id"] for row in await usage.logs(db, where, **page)]


async def plan(db: Database, where: UsageFilter, monkeypatch: pytest.MonkeyPatch) -> str:
    """How SQLite will find a page of the log."""
    asked: list[tuple[str, Any]] = []

    async def note(self: Database, sql: str, parameters: Any = ()) -> list[Any]:
        asked.append((sql, parameters))
        return []

    with monkeypatch.context() as patch:
        patch.setattr(Database, "fetch_all", note)
        await usage.logs(db, where)
    [(sql, parameters)] = asked
    return "\n".join(row[3] for row in await db.fetch_all(f"EXPLAIN QUERY PLAN {sql}", parameters))


async def test_the_columns_are_those_of_the_row_in_its_order(db: Database) -> None:
    columns = [row["name"] for row in await db.fetch_all("PRAGMA table_info(usage)")]
    assert columns == ["id", *UsageRow._fields]


async def test_a_log_row_has_the_fields_of_the_contract(db: Database) -> None:
    await keys.create(db, "ann")
    await servers.add(db, "gpu", "http://gpu")
    await usage.insert(db, [ROW._replace(model_name="fast")])
    [row] = await usage.logs(db, EVERYTHING)
    assert list(row.items()) == [
        ("id", 1),
        ("created_at", "2026-11-30T12:00:00.123Z"),
        ("request_id", "req-1"),
        ("key_id", 1),
        ("user_name", "ann"),
        ("server_id", 1),
        ("server_name", "gpu"),
        ("model_name", "fast"),
        ("real_model_name", "m"),
        ("endpoint", "/v1/chat/completions"),
        ("stream", True),
        ("status", 200),
        ("outcome", "ok"),
        ("prompt_tokens", 100),
        ("cached_tokens", 20),
        ("completion_tokens", 7),
        ("total_tokens", 107),
        ("tokens_source", "usage"),
        ("prompt_ms", 12.5),
        ("predicted_ms", None),
        ("ttft_ms", 3.25),
        ("duration_ms", 40.0),
    ]
    assert row["stream"] is True
    json.dumps(row)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (999, "1970-01-01T00:00:00.999Z"),
        (NOON + 7, "2026-11-30T12:00:00.007Z"),
        (253402300799999, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_iso_8601_in_utc(milliseconds: int, text: str) -> None:
    assert usage.iso(milliseconds) == text


async def test_a_request_without_a_server_is_booked_under_none(db: Database) -> None:
    await keys.create(db, "ann")
    await usage.insert(db, [ROW._replace(server_id=None, outcome="client_disconnect", stream=False)])
    [row] = await usage.logs(db, EVERYTHING)
    assert (row["server_id"], row["server_name"], row["stream"]) == (None, None, False)
    [total] = await usage.summary_by(db, EVERYTHING, ["server"])
    assert (total["server_id"], total["server_name"], total["request_count"]) == (None, None, 1)
    for since in (None, NOON, NOON + 1):  # from totals and from rows alike
        assert await usage.summary(db, UsageFilter(server_id=0, since=since)) == []
    assert await ids(db, UsageFilter(server_id=0)) == []


BAD: dict[str, list[Any]] = {
    "created_at": [-1, 253402300800000, None, 2**63],
    "request_id": [None, "\ud800"],
    "key_id": [None],
    "model_name": [None, "\udfff", ["m"]],
    "real_model_name": [None],
    "stream": [None],
    "status": [None],
    "prompt_tokens": [None, 2**64],
    "tokens_source": [None],
    "duration_ms": [None, object()],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
async def test_a_bad_row_among_good_ones_writes_none(db: Database, path: Path, field: str, value: Any) -> None:
    with pytest.raises(Invalid, match="does not take these values"):
        await usage.insert(db, [ROW, ROW._replace(**{field: value}), ROW])
    other = await Database.open(path, readonly=True)  # nothing hangs in an open transaction either
    assert await usage.logs(other, EVERYTHING) == []
    assert await usage.summary(other, EVERYTHING) == []
    await other.close()
    await usage.insert(db, [ROW])
    assert (await usage.summary(db, EVERYTHING))[0]["request_count"] == 1


async def test_no_rows_are_nothing(db: Database) -> None:
    await usage.insert(db, [])
    assert await usage.logs(db, EVERYTHING) == []
    assert await usage.summary(db, EVERYTHING) == []
    assert await usage.summary_real(db) == []


async def test_what_is_written_is_there_for_another_connection(db: Database, path: Path) -> None:
    other = await Database.open(path, readonly=True)
    await usage.insert(db, [ROW])
    assert len(await usage.logs(other, EVERYTHING)) == 1
    await other.close()


async def test_logs_are_newest_first_in_pages(db: Database) -> None:
    times = [5, 3, 9, 3, 7]
    await usage.insert(db, [ROW._replace(created_at=NOON + time) for time in times])
    assert await ids(db) == [3, 5, 1, 4, 2]  # by when the request came; of the same moment, the last written first
    assert await ids(db, limit=2) == [3, 5]
    assert await ids(db, limit=2, offset=2) == [1, 4]
    assert await ids(db, limit=2, offset=4) == [2]
    assert await ids(db, offset=5) == []
    assert await ids(db, limit=0) == []
    for page in ({"limit": -1}, {"offset": -1}):
        with pytest.raises(Invalid, match="must not be negative"):
            await usage.logs(db, EVERYTHING, **page)


async def test_100_rows_are_a_page(db: Database) -> None:
    await usage.insert(db, [ROW] * 101)
    assert len(await usage.logs(db, EVERYTHING)) == 100


FILTERS = [
    (EVERYTHING, [1, 2, 3, 4, 5]),
    (UsageFilter(key_id=1), [1, 2, 5]),
    (UsageFilter(key_id=3), []),
    (UsageFilter(server_id=1), [1, 3]),
    (UsageFilter(server_id=2), [2, 4]),
    (UsageFilter(server_id=3), []),
    (UsageFilter(model="m"), [1, 2, 3, 5]),  # asked or real
    (UsageFilter(model="fast"), [2, 5]),
    (UsageFilter(model="n"), [4]),
    (UsageFilter(model="M"), []),
    (UsageFilter(model="%"), []),
    (UsageFilter(key_id=1, model="fast"), [2, 5]),
    (UsageFilter(key_id=2, model="fast"), []),
    (UsageFilter(key_id=1, server_id=2), [2]),
    (UsageFilter(model="m", server_id=1), [1, 3]),
    (UsageFilter(model="fast", server_id=2, key_id=1), [2]),
    (UsageFilter(since=NOON + 2), [2, 3, 4, 5]),
    (UsageFilter(until=NOON + 2), [1]),
    (UsageFilter(since=NOON + 2, until=NOON + 4), [2, 3]),
    (UsageFilter(since=NOON + 4, until=NOON + 2), []),
    (UsageFilter(model="m", since=NOON + 2, until=NOON + 5), [2, 3]),
    (UsageFilter(key_id=1, since=NOON + 3), [5]),
]


@pytest.mark.parametrize(("where", "expected"), FILTERS)
async def test_filters_choose_the_same_rows_for_logs_and_summary(
    db: Database, where: UsageFilter, expected: list[int]
) -> None:
    first = ROW._replace(created_at=NOON + 1)
    await usage.insert(
        db,
        [
            first,
            first._replace(created_at=NOON + 2, model_name="fast", server_id=2),
            first._replace(created_at=NOON + 3, key_id=2),
            first._replace(created_at=NOON + 4, key_id=2, model_name="n", real_model_name="n", server_id=2),
            first._replace(created_at=NOON + 5, model_name="fast", server_id=None),
        ],
    )
    assert sorted(await ids(db, where)) == expected
    assert sum(row["request_count"] for row in await usage.summary(db, where)) == len(expected)


@pytest.mark.parametrize(
    ("where", "index"),
    [
        (EVERYTHING, "usage_time"),
        (UsageFilter(since=1, until=2), "usage_time (created_at>? AND created_at<?)"),
        (UsageFilter(key_id=1), "usage_key (key_id=?)"),
        (UsageFilter(key_id=1, server_id=1, model="m", since=1), "usage_key (key_id=? AND created_at>?)"),
        (UsageFilter(server_id=1), "usage_server (server_id=?)"),
        (UsageFilter(model="m"), "usage_model (real_model_name=?)"),
        (UsageFilter(model="m"), "usage_alias (model_name=?)"),
        (UsageFilter(model="m", server_id=1, until=2), "usage_model (real_model_name=? AND created_at<?)"),
    ],
)
async def test_a_page_of_the_log_is_found_by_an_index_in_its_order(
    db: Database, where: UsageFilter, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = await plan(db, where, monkeypatch)
    assert index in how
    found = how.split("SCAN page")[0]  # what follows is about the rows of one page
    assert "TEMP B-TREE" not in found
    assert "SCAN usage\n" not in how


async def test_purging_takes_the_oldest_in_batches_and_leaves_the_totals(db: Database) -> None:
    await usage.insert(db, [ROW._replace(created_at=NOON + time) for time in (1, 5, 2, 4, 3)])
    before = await usage.summary(db, EVERYTHING), await usage.summary_real(db)
    assert await usage.purge(db, NOON + 1) == 0
    assert await usage.purge(db, NOON + 5, batch=3) == 3
    assert await ids(db) == [2, 4]
    assert await usage.purge(db, NOON + 5, batch=3) == 1
    assert await usage.purge(db, NOON + 5, batch=3) == 0
    assert await ids(db) == [2]
    assert (await usage.summary(db, EVERYTHING), await usage.summary_real(db)) == before
    await usage.insert(db, [ROW])
    assert (await usage.summary(db, EVERYTHING))[0]["request_count"] == 6
    assert "usage_time" in str(
        [tuple(row) for row in await db.fetch_all("EXPLAIN QUERY PLAN SELECT id FROM usage WHERE created_at < 1")]
    )


async def test_deleting_a_key_or_a_server_keeps_its_rows_under_its_name(db: Database) -> None:
    await keys.create(db, "ann")
    await servers.add(db, "gpu", "http://gpu", models=["m"])
    await usage.insert(db, [ROW])
    await keys.delete(db, 1)
    await servers.remove(db, 1)
    await keys.create(db, "bob")
    await servers.add(db, "gpu", "http://other")
    [row] = await usage.logs(db, EVERYTHING)
    assert (row["user_name"], row["server_id"], row["server_name"]) == ("ann", 1, "gpu")
    assert (await usage.summary(db, EVERYTHING))[0]["key_name"] == "ann"
    [real] = await usage.summary_real(db)
    assert (real["server_id"], real["server_name"]) == (1, "gpu")


async def test_a_summary_row_has_the_fields_of_the_contract(db: Database) -> None:
    await keys.create(db, "ann")
    await usage.insert(db, [ROW._replace(model_name="fast"), ROW._replace(model_name="fast", prompt_tokens=1)])
    [row] = await usage.summary(db, EVERYTHING)
    assert list(row.items()) == [
        ("key_id", 1),
        ("key_name", "ann"),
        ("model_name", "fast"),
        ("real_model_name", "m"),
        ("request_count", 2),
        ("total_prompt_tokens", 101),
        ("total_cached_tokens", 40),
        ("total_completion_tokens", 14),
        ("total_all_tokens", 115),
    ]


async def test_summary_real_groups_by_real_model_and_server(db: Database) -> None:
    await servers.add(db, "gpu", "http://gpu")
    await usage.insert(
        db,
        [
            ROW,
            ROW._replace(model_name="fast", key_id=2),
            ROW._replace(server_id=None),
            ROW._replace(real_model_name="a"),
        ],
    )
    rows = await usage.summary_real(db)
    assert [tuple(row.values())[:4] for row in rows] == [("a", 1, "gpu", 1), ("m", None, None, 1), ("m", 1, "gpu", 2)]
    assert list(rows[0]) == [
        "real_model_name",
        "server_id",
        "server_name",
        "request_count",
        "total_prompt_tokens",
        "total_cached_tokens",
        "total_completion_tokens",
        "total_all_tokens",
    ]


async def test_groups_give_their_fields_in_the_order_asked(db: Database) -> None:
    await keys.create(db, "ann")
    await servers.add(db, "gpu", "http://gpu")
    await usage.insert(db, [ROW, ROW._replace(created_at=NOON - 13 * HOUR), ROW._replace(created_at=NOON + HOUR)])

    async def heads(*by: str) -> list[dict[str, Any]]:
        rows = await usage.summary_by(db, EVERYTHING, by)
        return [{name: value for name, value in row.items() if not name.startswith("total_")} for row in rows]

    assert await heads("day") == [{"day": "2026-11-29", "request_count": 1}, {"day": "2026-11-30", "request_count": 2}]
    hours = ["2026-11-29T23:00:00Z", "2026-11-30T12:00:00Z", "2026-11-30T13:00:00Z"]
    assert await heads("hour") == [{"hour": hour, "request_count": 1} for hour in hours]
    [row] = await heads("server", "key")
    assert list(row.items()) == [
        ("server_id", 1),
        ("server_name", "gpu"),
        ("key_id", 1),
        ("key_name", "ann"),
        ("request_count", 3),
    ]
    rows = await heads("model", "day")
    assert list(rows[0]) == ["model_name", "real_model_name", "day", "request_count"]


@pytest.mark.parametrize("by", [[], ["colour"], ["key", "key"], ["key", "1; DROP TABLE usage"]])
async def test_unknown_groups_are_refused(db: Database, by: list[str]) -> None:
    with pytest.raises(Invalid, match="group by any of key, model, server, day, hour: "):
        await usage.summary_by(db, EVERYTHING, by)
