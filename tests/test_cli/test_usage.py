"""smolproxy usage."""

import csv
import io
import json
import time
from datetime import datetime, timedelta, timezone

import pytest

from smolproxy.store import keys, servers, usage

HOUR = 3_600_000
DAY = 24 * HOUR
NOON = int(datetime(2026, 5, 31, 12, tzinfo=timezone.utc).timestamp() * 1000)

SUMMARY_FIELDS = [
    "key_id", "key_name", "model_name", "real_model_name", "request_count", "total_prompt_tokens",
    "total_cached_tokens", "total_completion_tokens", "total_all_tokens",
]  # fmt: skip
LOG_FIELDS = [
    "id", "created_at", "request_id", "key_id", "user_name", "server_id", "server_name", "model_name",
    "real_model_name", "endpoint", "stream", "status", "outcome", "prompt_tokens", "cached_tokens",
    "completion_tokens", "total_tokens", "tokens_source", "prompt_ms", "predicted_ms", "ttft_ms", "duration_ms",
]  # fmt: skip


def row(created_at, key=1, server=1, model="m", real=None, prompt=1000, cached=100, completion=10, **other):
    values = {
        "created_at": created_at,
        "request_id": f"r{created_at}",
        "key_id": key,
        "server_id": server,
        "model_name": model,
        "real_model_name": real or model,
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "tokens_source": "usage",
        "prompt_ms": 1.5,
        "predicted_ms": None,
        "ttft_ms": 12.25,
        "duration_ms": 2000.0,
    }
    return usage.UsageRow(**{**values, **other})


@pytest.fixture
def books(db):
    """Two keys, two servers, four requests on two days."""
    db(keys.create, "ann")
    db(keys.create, "bob")
    db(servers.add, "gpu", "http://a")
    db(servers.add, "cpu", "http://b")
    db(
        usage.insert,
        [
            row(NOON - DAY),
            row(NOON, model="fast", real="m"),
            row(NOON + HOUR, key=2, server=2, prompt=5),
            row(NOON + HOUR + 1, key=2, server=None, outcome="client_disconnect", prompt=0, cached=0, completion=0),
        ],
    )


def summary(run, *args):
    return json.loads(run("usage", "--json", *args).stdout)["summary"]


def counts(run, *args):
    """Requests per asked model and key."""
    return {(line["key_name"], line["model_name"]): line["request_count"] for line in summary(run, *args)}


def test_a_summary_by_default(run, books):
    assert [line.split() for line in run("usage").stdout.splitlines()] == [
        ["key", "model", "real", "model", "requests", "prompt", "cached", "completion", "total"],
        ["ann", "fast", "m", "1", "1,000", "100", "10", "1,010"],
        ["ann", "m", "m", "1", "1,000", "100", "10", "1,010"],
        ["bob", "m", "m", "2", "5", "100", "10", "15"],
    ]


def test_json_has_logs_and_summary_with_and_without_logs(run, books):
    found = json.loads(run("usage", "--json").stdout)
    assert list(found) == ["logs", "summary"]
    assert [list(line) for line in found["logs"]] == [LOG_FIELDS] * 4
    assert [list(line) for line in found["summary"]] == [SUMMARY_FIELDS] * 3
    assert found == json.loads(run("usage", "--logs", "--json").stdout)
    assert found["logs"][0]["created_at"] == "2026-05-31T13:00:00.001Z"
    assert found["logs"][1]["server_name"] == "cpu"


def test_csv_of_the_summary(run, books):
    lines = list(csv.DictReader(io.StringIO(run("usage", "--csv").stdout)))
    assert list(lines[0]) == SUMMARY_FIELDS
    assert [{name: str(value) for name, value in line.items()} for line in summary(run)] == lines


def test_csv_of_the_logs(run, books):
    first, *_ = lines = list(csv.DictReader(io.StringIO(run("usage", "--csv", "--logs").stdout)))
    assert list(first) == LOG_FIELDS
    assert len(lines) == 4
    assert (first["stream"], first["predicted_ms"], first["server_id"], first["prompt_ms"]) == ("true", "", "", "1.5")


def test_csv_has_its_header_also_without_rows(run):
    assert run("usage", "--csv").stdout == ",".join(SUMMARY_FIELDS) + "\n"
    assert run("usage", "--csv", "--logs").stdout == ",".join(LOG_FIELDS) + "\n"


def test_a_table_of_the_logs(run, books):
    head, first, second, *_ = run("usage", "--logs").stdout.splitlines()
    assert head.split("  ")[0] == "time (UTC)"
    assert first.split()[:2] == ["2026-05-31T13:00:00.001Z", "bob"]
    assert "client_disconnect" in first
    assert second.split()[1:] == [
        "bob", "cpu", "m", "m", "200", "ok", "5", "100", "10", "15", "usage", "12.2", "2,000.0",
    ]  # fmt: skip


def test_no_usage_gives_a_hint(run):
    for args in ([], ["--logs"]):
        result = run("usage", *args)
        assert (result.stdout, result.stderr) == ("", "no usage recorded yet, or none that matches\n")
    assert json.loads(run("usage", "--json").stdout) == {"logs": [], "summary": []}


def test_filters(run, books):
    assert counts(run, "--key", 2) == {("bob", "m"): 2}
    assert counts(run, "--server", 1) == {("ann", "m"): 1, ("ann", "fast"): 1}
    assert counts(run, "--model", "fast") == {("ann", "fast"): 1}
    assert counts(run, "--key", 1, "--server", 2) == {}
    assert len(json.loads(run("usage", "--logs", "--json", "--key", 1).stdout)["logs"]) == 2


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--since", "2026-05-31"), 3),
        (("--since", "2026-05-31T13:00"), 2),
        (("--since", "2026-05-31T13:00:00.001Z"), 1),
        (("--since", "2026-05-31T15:00:00+02:00"), 2),
        (("--until", "2026-05-30"), 1),
        (("--until", "2026-05-31"), 4),
        (("--until", "2026-05-31T13:00"), 2),
        (("--since", "2026-05-30", "--until", "2026-05-30"), 1),
        (("--since", "1d"), 0),
    ],
)
def test_times(run, books, args, expected):
    found = json.loads(run("usage", "--json", *args).stdout)
    assert len(found["logs"]) == expected
    assert sum(line["request_count"] for line in found["summary"]) == expected


def test_an_age_counts_back_from_now(run, books, db):
    now = time.time_ns() // 1_000_000
    db(usage.insert, [row(now - 2 * HOUR), row(now - 20_000, key=2)])
    assert counts(run, "--since", "90m") == {("bob", "m"): 1}
    assert counts(run, "--since", "3h") == {("bob", "m"): 1, ("ann", "m"): 1}
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    assert counts(run, "--since", "3h", "--until", f"{tomorrow:%Y-%m-%d}") == counts(run, "--since", "3h")


def test_groups(run, books):
    assert [line.split() for line in run("usage", "--by", "server").stdout.splitlines()] == [
        ["server", "requests", "prompt", "cached", "completion", "total"],
        ["-", "1", "0", "0", "0", "0"],
        ["gpu", "2", "2,000", "200", "20", "2,020"],
        ["cpu", "1", "5", "100", "10", "15"],
    ]
    assert [(line["day"], line["request_count"]) for line in summary(run, "--by", "day")] == [
        ("2026-05-30", 1),
        ("2026-05-31", 3),
    ]
    assert [line["hour"] for line in summary(run, "--by", "hour")] == [
        "2026-05-30T12:00:00Z",
        "2026-05-31T12:00:00Z",
        "2026-05-31T13:00:00Z",
    ]


def test_several_groups_with_commas_or_repeated(run, books):
    found = summary(run, "--by", "key,day")
    assert list(found[0])[:3] == ["key_id", "key_name", "day"]
    assert [(line["key_name"], line["day"]) for line in found] == [
        ("ann", "2026-05-30"),
        ("ann", "2026-05-31"),
        ("bob", "2026-05-31"),
    ]
    assert summary(run, "--by", "key", "--by", "day, key") == found
    assert run("usage", "--csv", "--by", "key,day").stdout.splitlines()[0].startswith("key_id,key_name,day,request")


def test_groups_go_with_the_logs_in_json(run, books):
    found = json.loads(run("usage", "--logs", "--json", "--by", "day").stdout)
    assert len(found["logs"]) == 4
    assert [line["request_count"] for line in found["summary"]] == [1, 3]


def test_limit_and_offset(run, books):
    ids = [line["id"] for line in json.loads(run("usage", "--json").stdout)["logs"]]
    page = json.loads(run("usage", "--json", "--limit", 2, "--offset", 1).stdout)
    assert [line["id"] for line in page["logs"]] == ids[1:3]
    assert page["summary"] == summary(run)


def test_a_hundred_rows_by_default(run, books, db):
    db(usage.insert, [row(NOON + number) for number in range(1100)])
    assert len(json.loads(run("usage", "--json").stdout)["logs"]) == 100
    assert len(json.loads(run("usage", "--json", "--limit", 1000).stdout)["logs"]) == 1000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--json", "--csv"), "--json and --csv exclude each other"),
        (("--logs", "--by", "key"), "--by groups the summary"),
        (("--by", "user"), "'user' is not one of key, model, server, day, hour"),
        (("--by", "key,"), "'' is not one of"),
        (("--since", "yesterday"), "'yesterday' is no time"),
        (("--until", "2026-13-01"), "'2026-13-01' is no time"),
        (("--since", "2026-05-31", "--until", "2026-05-30"), "--since must be before --until"),
        (("--limit", "0"), "1<=x<=1000"),
        (("--limit", "1001"), "1<=x<=1000"),
        (("--offset", "-1"), "--offset"),
        (("--key", "ann"), "--key"),
        (("--server", "0"), "--server"),
        (("surplus",), "unexpected extra argument"),
    ],
)
def test_wrong_usage(misused, args, message):
    assert message in misused("usage", *args)


def test_a_deleted_key_keeps_its_usage_under_its_name(run, books, db):
    run("keys", "delete", 1)
    run("servers", "remove", 1)
    assert counts(run, "--key", 1) == {("ann", "m"): 1, ("ann", "fast"): 1}
    assert {line["server_name"] for line in summary(run, "--key", 1, "--by", "server")} == {"gpu"}
