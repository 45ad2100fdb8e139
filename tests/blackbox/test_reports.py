"""The reports of the admin API, and the command that prints the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smolproxy.standin import StandIn

from .harness import Daemon

ROW = {
    *("id", "created_at", "request_id", "key_id", "user_name", "server_id", "server_name", "model_name"),
    *("real_model_name", "endpoint", "stream", "status", "outcome", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "total_tokens", "tokens_source", "prompt_ms", "predicted_ms", "ttft_ms", "duration_ms"),
}
SUMMARY = {
    *("key_id", "key_name", "model_name", "real_model_name", "request_count", "total_prompt_tokens"),
    *("total_cached_tokens", "total_completion_tokens", "total_all_tokens"),
}


@pytest.fixture
async def booked(daemon: Daemon) -> dict[str, int]:
    """Six requests of two keys for two models at two servers, one by an alias; made once."""
    if not daemon.rows():
        async with StandIn(["big"]) as one, StandIn(["small"]) as two:
            servers = [await daemon.add_server(one, "one"), await daemon.add_server(two, "two")]
            await daemon.admin("POST", "/aliases", {"alias_name": "tiny", "real_model_name": "small"})
            keys = [await daemon.admin("POST", "/keys", {"name": name}) for name in ("ann", "bob")]
            for key, model, stream in (
                (0, "big", False),
                (0, "big", True),
                (0, "small", False),
                (1, "small", True),
                (1, "tiny", False),
                (1, "big", False),
            ):
                body = {
                    "model": model,
                    "stream": stream,
                    "max_tokens": 4,
                    "messages": [{"role": "user", "content": "x"}],
                }
                answer = await daemon.ask("POST", "/v1/chat/completions", key=keys[key]["key"], json=body)
                assert answer.status == 200
            for server in servers:
                await daemon.admin("PATCH", f"/servers/{server}", {"active": False})
    return {row["user_name"]: row["key_id"] for row in (await daemon.admin("GET", "/usage"))["logs"]}


async def test_rows_and_summary(daemon: Daemon, booked: dict[str, int]) -> None:
    answer = await daemon.admin("GET", "/usage")
    assert set(answer) == {"logs", "summary"}
    assert len(answer["logs"]) == 6
    for row in answer["logs"]:
        assert set(row) == ROW
        assert row["total_tokens"] == row["prompt_tokens"] + row["completion_tokens"]
        assert row["created_at"].endswith("Z")
        assert isinstance(row["stream"], bool)
        assert row["completion_tokens"] == 4
    ids = [row["id"] for row in answer["logs"]]
    assert ids == sorted(ids, reverse=True)
    assert [(row["user_name"], row["model_name"], row["real_model_name"]) for row in answer["logs"][::-1]] == [
        ("ann", "big", "big"),
        ("ann", "big", "big"),
        ("ann", "small", "small"),
        ("bob", "small", "small"),
        ("bob", "tiny", "small"),
        ("bob", "big", "big"),
    ]
    for row in answer["summary"]:
        assert set(row) == SUMMARY
        same = [
            log for log in answer["logs"] if (log["key_id"], log["model_name"]) == (row["key_id"], row["model_name"])
        ]
        assert row["request_count"] == len(same)
        for total, single in (
            ("total_prompt_tokens", "prompt_tokens"),
            ("total_cached_tokens", "cached_tokens"),
            ("total_completion_tokens", "completion_tokens"),
            ("total_all_tokens", "total_tokens"),
        ):
            assert row[total] == sum(log[single] for log in same)
    assert len(answer["summary"]) == 5


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("key_id={ann}", 3),
        ("key_id={bob}", 3),
        ("key_id=99999", 0),
        ("model=big", 3),
        ("model=small", 3),
        ("model=tiny", 1),
        ("model=tiny&key_id={ann}", 0),
        ("server_id=1", 3),
        ("server_id=1&key_id={bob}", 1),
        ("start_date=2020-01-01", 6),
        ("start_date=1h", 6),
        ("start_date=2099-01-01", 0),
        ("end_date=2020-01-01", 0),
        ("end_date=2099-01-01", 6),
        ("start_date=2020-01-01T00:00:00Z&end_date=2099-01-01T00:00:00%2B02:00", 6),
    ],
)
async def test_filters_and_dates(daemon: Daemon, booked: dict[str, int], query: str, count: int) -> None:
    answer = await daemon.admin("GET", f"/usage?{query.format(**booked)}")
    assert len(answer["logs"]) == count
    assert sum(row["request_count"] for row in answer["summary"]) == count


async def test_a_day_alone_as_end_includes_it(daemon: Daemon, booked: dict[str, int]) -> None:
    day = (await daemon.admin("GET", "/usage"))["logs"][-1]["created_at"][:10]
    answer = await daemon.admin("GET", f"/usage?start_date={day}&end_date={day}")
    assert len(answer["logs"]) >= 1


async def test_pages(daemon: Daemon, booked: dict[str, int]) -> None:
    whole = (await daemon.admin("GET", "/usage"))["logs"]
    pages: list[Any] = []
    for offset in (0, 2, 4, 6):
        answer = await daemon.admin("GET", f"/usage?limit=2&offset={offset}")
        pages += answer["logs"]
        assert sum(row["request_count"] for row in answer["summary"]) == 6  # a page of rows is no filter
    assert pages == whole
    assert (await daemon.admin("GET", "/usage?limit=0"))["logs"] == []
    assert (await daemon.admin("GET", "/usage?limit=100000"))["logs"] == whole


async def test_totals_by_real_model_and_server(daemon: Daemon, booked: dict[str, int]) -> None:
    rows = await daemon.admin("GET", "/usage/summary/real")
    assert [(row["real_model_name"], row["server_name"], row["request_count"]) for row in rows] == [
        ("big", "one", 3),
        ("small", "two", 3),
    ]
    assert {row["total_completion_tokens"] for row in rows} == {12}


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ([], ""),
        (["--key", "{ann}"], "key_id={ann}"),
        (["--model", "tiny"], "model=tiny"),
        (["--server", "1"], "server_id=1"),
        (["--logs", "--limit", "2", "--offset", "1"], "limit=2&offset=1"),
        (["--since", "2020-01-01", "--until", "2021-01-01"], "start_date=2020-01-01&end_date=2021-01-01"),
    ],
)
async def test_the_command_prints_the_same(
    daemon: Daemon, booked: dict[str, int], arguments: list[str], query: str
) -> None:
    printed = await daemon.cli("usage", "--json", *(argument.format(**booked) for argument in arguments))
    assert json.loads(printed.out) == await daemon.admin("GET", f"/usage?{query.format(**booked)}")
