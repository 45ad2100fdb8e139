from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core.limits import (
    FIELDS,
    Limits,
    limits_as_json,
    limits_from_defaults,
    model_allowed,
    parse_expiry,
    parse_limits,
    unmatched_models,
)
from smolproxy.errors import Invalid

NOW = 1_800_000_000_000  # 2027-01-15T08:00:00Z
DAY = 86_400_000
COUNTS = ["rpm_limit", "tpm_limit", "parallel_limit", "budget", "max_tokens", "priority"]

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=80)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def test_every_field() -> None:
    assert parse_limits(
        {
            "rpm_limit": 10,
            "tpm_limit": 2000,
            "parallel_limit": 2,
            "budget": 10**6,
            "budget_period": "week",
            "models": ["qwen*", "fast"],
            "expires_at": "2030-01-02T03:04:05Z",
            "max_tokens": 512,
            "priority": 4,
        },
        now_ms=NOW,
    ) == {
        "rpm_limit": 10,
        "tpm_limit": 2000,
        "parallel_limit": 2,
        "budget": 10**6,
        "budget_period": "week",
        "models": ("qwen*", "fast"),
        "expires_at": ms("2030-01-02T03:04:05+00:00"),
        "max_tokens": 512,
        "priority": 4,
    }


def test_only_what_is_given_is_returned() -> None:
    assert parse_limits({}, now_ms=NOW) == {}
    assert parse_limits({"budget": 5}, now_ms=NOW) == {"budget": 5}


def test_null_clears_each_field() -> None:
    assert parse_limits(dict.fromkeys(FIELDS), now_ms=NOW) == dict.fromkeys(FIELDS)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value",
    [
        -1,
        1.5,
        10.0,
        True,
        False,
        "10",
        "",
        [],
        {},
        2**53 + 1,
        pytest.param(10**5000, id="huge"),
        float("inf"),
        float("nan"),
    ],
)
def test_bad_counts(name: str, value: object) -> None:
    with pytest.raises(Invalid, match=rf"^{name} takes a whole number from [01] to {2**53}, not .") as caught:
        parse_limits({name: value}, now_ms=NOW)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize("name", COUNTS)
def test_smallest_and_largest_counts(name: str) -> None:
    least = 1 if name == "priority" else 0
    assert parse_limits({name: least}, now_ms=NOW) == {name: least}
    assert parse_limits({name: 2**53}, now_ms=NOW) == {name: 2**53}
    with pytest.raises(Invalid, match=name):
        parse_limits({name: least - 1}, now_ms=NOW)


@pytest.mark.parametrize("name", ["rpm", "Rpm_limit", "name", "", "id", "x" * 10_000])
def test_unknown_fields(name: str) -> None:
    with pytest.raises(Invalid, match=r"no limit is called .*; there are rpm_limit, .*, priority") as caught:
        parse_limits({"rpm_limit": 1, name: 1}, now_ms=NOW)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["year", "Day", "", 1, ["day"], True])
def test_unknown_periods(value: object) -> None:
    with pytest.raises(Invalid, match=r"^budget_period takes day, week or month, not "):
        parse_limits({"budget_period": value}, now_ms=NOW)


@pytest.mark.parametrize("value", ["qwen", {"a": 1}, 5, [""], ["  "], ["a", 5], [None], ["a\0b"], ["\ud800"], [["a"]]])
def test_bad_models(value: object) -> None:
    with pytest.raises(Invalid, match=r"^models takes an array of model names or globs"):
        parse_limits({"models": value}, now_ms=NOW)


def test_models() -> None:
    assert parse_limits({"models": []}, now_ms=NOW) == {"models": ()}
    names = ["a/b:c d%é😀", "x" * 300, "*", "[ab]?"]
    assert parse_limits({"models": [*names, "*"]}, now_ms=NOW) == {"models": tuple(names)}


def test_a_nest_is_told_in_short() -> None:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    with pytest.raises(Invalid) as caught:
        parse_limits({"models": nest}, now_ms=NOW)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2027-06-01", "2027-06-01T00:00+00:00"),
        ("2027-06-01T12:30", "2027-06-01T12:30+00:00"),
        ("2027-06-01 12:30:15", "2027-06-01T12:30:15+00:00"),
        ("2027-06-01T12:30:15Z", "2027-06-01T12:30:15+00:00"),
        ("2027-06-01t12:30z", "2027-06-01T12:30+00:00"),
        ("2027-06-01T12:30:15+02:00", "2027-06-01T10:30:15+00:00"),
        ("2027-06-01T12:30:15 -05:30", "2027-06-01T18:00:15+00:00"),
        ("2027-06-01T12:30:15.5Z", "2027-06-01T12:30:15.500+00:00"),
        ("2027-06-01T12:30:15.123456789", "2027-06-01T12:30:15.123+00:00"),
        ("2027-01-15T08:00:00.001Z", "2027-01-15T08:00:00.001+00:00"),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59+00:00"),
    ],
)
def test_expiry(text: str, moment: str) -> None:
    assert parse_limits({"expires_at": text}, now_ms=NOW) == {"expires_at": ms(moment)}


@pytest.mark.parametrize(
    "value",
    [
        "tomorrow", "", "2027", "2027-06", "20270601", "2027-02-30", "2027-06-01T25:00", "2027-06-01T12", "2027-W05-1",
        "2027-06-01T12:30.5", "2027-06-01T12:30:15+24:00", "٢٠٢٧-06-01", " 2027-06-01", "2027-06-01\n", "30d",
        1_900_000_000, 1_900_000_000_000, 1.9e9, True, [], {},
    ],
)  # fmt: skip
def test_bad_expiry(value: object) -> None:
    with pytest.raises(Invalid, match=r"^expires_at takes an ISO 8601 date or time such as "):
        parse_limits({"expires_at": value}, now_ms=NOW)


@pytest.mark.parametrize("value", ["2020-01-01", "2027-01-15", "2027-01-15T08:00:00Z", "2027-01-15T09:00+01:00"])
def test_expiry_in_the_past(value: str) -> None:
    with pytest.raises(Invalid, match=r"^expires_at takes a time in the future, not '"):
        parse_limits({"expires_at": value}, now_ms=NOW)


def test_expiry_beyond_the_calendar() -> None:
    with pytest.raises(Invalid, match=r"^expires_at takes a time before the year 10000"):
        parse_limits({"expires_at": "9999-12-31T23:59:59-01:00"}, now_ms=NOW)
    with pytest.raises(Invalid, match=r"^expires_at takes a time before the year 10000"):
        parse_expiry("999999999w", now_ms=NOW, ages=True)


@pytest.mark.parametrize(
    ("age", "seconds"), [("1s", 1), ("5m", 300), ("24h", 86_400), ("30d", 30 * 86_400), ("2w", 14 * 86_400)]
)
def test_ages(age: str, seconds: int) -> None:
    assert parse_expiry(age, now_ms=NOW, ages=True) == NOW + seconds * 1000
    with pytest.raises(Invalid):
        parse_expiry(age, now_ms=NOW)


@pytest.mark.parametrize("age", ["d", "-1d", "1.5d", "30 d", "30y", "30D", "٣d"])
def test_bad_ages(age: str) -> None:
    with pytest.raises(Invalid, match=r"^expires_at takes .*, or an age such as 30d, not "):
        parse_expiry(age, now_ms=NOW, ages=True)


def test_an_age_of_0_is_over() -> None:
    with pytest.raises(Invalid, match="future"):
        parse_expiry("0d", now_ms=NOW, ages=True)


def test_defaults_of_new_keys() -> None:
    assert limits_from_defaults({}, NOW) == Limits()
    assert limits_from_defaults({"rpm_limit": 5, "models": ["a"], "expires_at": "30d", "budget": None}, NOW) == Limits(
        rpm_limit=5, models=("a",), expires_at=NOW + 30 * DAY
    )
    # YAML reads these itself
    assert limits_from_defaults({"expires_at": date(2027, 6, 1)}, NOW).expires_at == ms("2027-06-01T00:00+00:00")
    assert limits_from_defaults({"expires_at": datetime(2027, 6, 1, 2)}, NOW).expires_at == ms("2027-06-01T02:00+00:00")
    zoned = datetime(2027, 6, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert limits_from_defaults({"expires_at": zoned}, NOW).expires_at == ms("2027-06-01T00:00+00:00")
    with pytest.raises(Invalid, match="no limit is called 'rpm'"):
        limits_from_defaults({"rpm": 5}, NOW)
    with pytest.raises(Invalid, match="not 2027-01-01"):
        limits_from_defaults({"expires_at": date(2027, 1, 1)}, NOW)


def test_as_json() -> None:
    assert limits_as_json(Limits()) == dict.fromkeys(FIELDS)
    shown = limits_as_json(Limits(rpm_limit=0, models=("a", "b*"), expires_at=ms("2030-01-02T03:04:05+00:00")))
    assert shown["rpm_limit"] == 0
    assert shown["models"] == ["a", "b*"]
    assert shown["expires_at"] == "2030-01-02T03:04:05Z"
    assert limits_as_json(Limits(expires_at=NOW + 7))["expires_at"] == "2027-01-15T08:00:00.007Z"
    assert limits_as_json(Limits(models=()))["models"] == []


@given(st.integers(NOW + 1, 253_402_300_799_999))
def test_expiry_survives_the_way_out_and_in(moment: int) -> None:
    shown = limits_as_json(Limits(expires_at=moment))
    assert parse_limits(shown, now_ms=NOW)["expires_at"] == moment


@given(st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=20)), JSON))
def test_whatever_json_holds_is_parsed_or_refused(changes: dict[str, object]) -> None:
    try:
        found = parse_limits(changes, now_ms=NOW)
    except Invalid as error:
        message = str(error)
    else:
        message = ""
        assert found.keys() == changes.keys()
        assert parse_limits(limits_as_json(Limits(**found)), now_ms=NOW) == {**dict.fromkeys(FIELDS), **found}
    assert len(message) < 400


@pytest.mark.parametrize(
    ("models", "asked", "real", "allowed"),
    [
        (None, "anything", "anything", True),
        ((), "a", "a", False),
        (("a",), "a", "a", True),
        (("a",), "b", "b", False),
        (("a",), "A", "A", False),
        (("qwen3-*",), "qwen3-8b.gguf", "qwen3-8b.gguf", True),
        (("qwen3-*",), "fast", "qwen3-8b.gguf", True),  # the model is allowed, by whatever name
        (("fast",), "fast", "qwen3-8b.gguf", True),  # the alias is allowed
        (("fast",), "qwen3-8b.gguf", "qwen3-8b.gguf", False),
        (("*",), "org/model:7b x", "org/model:7b x", True),
        (("org/*",), "org/a/b", "org/a/b", True),
        (("m[1].gguf",), "m[1].gguf", "m[1].gguf", True),  # a name that looks like a glob is a name first
        (("m[1].gguf",), "m1.gguf", "m1.gguf", True),
        (("[",), "[", "[", True),
        (("b", "?a"), "xa", "y", True),
    ],
)
def test_allowed_models(models: tuple[str, ...] | None, asked: str, real: str, allowed: bool) -> None:
    assert model_allowed(Limits(models=models), asked, real) is allowed


def test_globs_that_match_nothing() -> None:
    assert unmatched_models(["qwen*", "gemma*", "m[1]", "fast"], iter(["qwen3", "m[1]"])) == ["gemma*", "fast"]
