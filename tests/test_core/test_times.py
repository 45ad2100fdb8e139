"""Times as people write them."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core import times
from smolproxy.errors import Invalid

NOW = 1_780_000_000_123


def ms(*args):
    return int(datetime(*args, tzinfo=timezone.utc).timestamp()) * 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-05-31", ms(2026, 5, 31)),
        (" 2026-05-31 ", ms(2026, 5, 31)),
        ("2026-05-31T18:30", ms(2026, 5, 31, 18, 30)),
        ("2026-05-31 18:30:05", ms(2026, 5, 31, 18, 30, 5)),
        ("2026-05-31T18:30:05.250", ms(2026, 5, 31, 18, 30, 5) + 250),
        ("2026-05-31T18:30:05Z", ms(2026, 5, 31, 18, 30, 5)),
        ("2026-05-31T18:30z", ms(2026, 5, 31, 18, 30)),
        ("2026-05-31T18:30:00+02:00", ms(2026, 5, 31, 16, 30)),
        ("1960-01-01", ms(1960, 1, 1)),
        ("90s", NOW - 90_000),
        ("30m", NOW - 1_800_000),
        ("24h", NOW - 86_400_000),
        ("7d", NOW - 7 * 86_400_000),
        ("2w", NOW - 14 * 86_400_000),
        ("0d", NOW),
    ],
)
def test_a_time(text, expected):
    assert times.parse(text, NOW) == expected


def test_a_date_alone_may_mean_its_end():
    assert times.parse("2026-05-31", NOW, end_of_day=True) == ms(2026, 6, 1)
    assert times.parse("2026-05-31T00:00", NOW, end_of_day=True) == ms(2026, 5, 31)
    assert times.parse("7d", NOW, end_of_day=True) == times.parse("7d", NOW)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "Z", "7", "7 d", "d", "-7d", "1.5d", "7y", "99999999999d", "999999999w", "٣d", "yesterday",
        "2026-02-30", "2026-05-31T25:00", "31.05.2026", "2026-05-31T18:30:00+25:00", "9999-12-31T23:59:59-23:59x", "\0",
    ],
)  # fmt: skip
def test_what_is_no_time(text):
    with pytest.raises(Invalid, match="is no time"):
        times.parse(text, NOW)


def test_the_last_day_has_no_end():
    with pytest.raises(Invalid, match="is no time"):
        times.parse("9999-12-31", NOW, end_of_day=True)


@given(
    st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(9000, 1, 1)),
    st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
def test_what_python_writes_is_read(moment, zone):
    moment = moment.replace(tzinfo=zone)
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    assert times.parse(moment.isoformat(), NOW) == (moment - epoch) // timedelta(milliseconds=1)


@given(st.text(max_size=30))
def test_any_text_is_a_time_or_refused(text):
    message = ""
    try:
        assert isinstance(times.parse(text, NOW), int)
    except Invalid as error:
        message = str(error)
    assert "\n" not in message


def test_short():
    assert times.short(ms(2026, 5, 31, 18, 30, 5) + 999) == "2026-05-31 18:30:05"
