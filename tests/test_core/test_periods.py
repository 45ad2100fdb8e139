from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.periods import PERIODS, Calendar, period_bounds

ZONES = ["UTC", "Europe/Berlin", "America/Havana", "America/Sao_Paulo", "Pacific/Apia", "Asia/Kathmandu", "Asia/Beirut"]
HOUR = 3600

zones = st.sampled_from(ZONES).map(ZoneInfo)
moments = st.floats(0, 4e9, allow_nan=False)


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_in_utc() -> None:
    now = unix("2026-07-16T12:34:56.789+00:00")  # a Thursday
    assert period_bounds("day", now) == (unix("2026-07-16T00:00+00:00"), unix("2026-07-17T00:00+00:00"))
    assert period_bounds("week", now) == (unix("2026-07-13T00:00+00:00"), unix("2026-07-20T00:00+00:00"))
    assert period_bounds("month", now) == (unix("2026-07-01T00:00+00:00"), unix("2026-08-01T00:00+00:00"))


@pytest.mark.parametrize(
    ("month", "days"), [("2024-02", 29), ("2026-02", 28), ("2026-12", 31), ("2026-04", 30), ("2026-01", 31)]
)
def test_months_have_their_length(month: str, days: int) -> None:
    start, end = period_bounds("month", unix(f"{month}-15T00:00+00:00"))
    assert (end - start) / 86_400 == days


def test_a_boundary_belongs_to_the_later_period() -> None:
    midnight = unix("2026-06-01T00:00+00:00")  # a Monday
    for period in PERIODS:
        assert period_bounds(period, midnight).start == midnight
        assert period_bounds(period, midnight - 1e-6).end == midnight


def test_less_than_a_microsecond_before_midnight() -> None:
    assert period_bounds("day", 86_399.9999999) == (0, 86_400)


def test_fixed_offset() -> None:
    start = period_bounds("day", unix("2026-07-16T23:00+00:00"), timezone(timedelta(hours=2))).start
    assert start == unix("2026-07-17T00:00+02:00")


@pytest.mark.parametrize(
    ("zone", "noon", "hours", "start"),
    [
        ("Europe/Berlin", "2026-03-29T12:00+02:00", 23, "2026-03-29T00:00+01:00"),
        ("Europe/Berlin", "2026-10-25T12:00+01:00", 25, "2026-10-25T00:00+02:00"),
        # midnight is twice: the day begins with the first
        ("America/Havana", "2022-11-06T12:00-05:00", 25, "2022-11-06T00:00-04:00"),
        # there is no midnight: the clock goes from 23:59:59 to 01:00
        ("America/Sao_Paulo", "2018-11-04T12:00-02:00", 23, "2018-11-04T01:00-02:00"),
        # the last hour is twice
        ("America/Sao_Paulo", "2019-02-16T12:00-02:00", 25, "2019-02-16T00:00-02:00"),
    ],
)
def test_daylight_saving(zone: str, noon: str, hours: int, start: str) -> None:
    day = period_bounds("day", unix(noon), ZoneInfo(zone))
    assert day == (unix(start), unix(start) + hours * HOUR)


def test_a_week_over_a_change_of_the_clock() -> None:
    start, end = period_bounds("week", unix("2026-03-28T12:00+01:00"), ZoneInfo("Europe/Berlin"))
    assert (end - start) / HOUR == 7 * 24 - 1


@settings(deadline=None)
@given(st.sampled_from(PERIODS), moments, zones)
def test_periods_follow_each_other(period: str, now: float, zone: ZoneInfo) -> None:
    found = period_bounds(period, now, zone)
    assert found.start <= now < found.end
    assert period_bounds(period, found.start, zone) == found
    assert period_bounds(period, found.end - 1, zone) == found
    assert period_bounds(period, found.end, zone).start == found.end


def test_a_year_with_a_skipped_day() -> None:
    zone = ZoneInfo("Pacific/Apia")
    now = period_bounds("day", unix("2011-01-15T00:00+00:00"), zone).start
    for _ in range(364):  # not 365: there was no 30th of December 2011
        day = period_bounds("day", now, zone)
        assert day.start == now
        assert 23 * HOUR <= day.end - day.start <= 25 * HOUR
        now = day.end
    assert datetime.fromtimestamp(now, zone).date().isoformat() == "2012-01-14"


def test_no_such_period() -> None:
    with pytest.raises(ValueError, match="year"):
        period_bounds("year", 0.0)


@settings(deadline=None)
@given(st.lists(moments, min_size=1), zones)
def test_the_calendar_agrees(times: list[float], zone: ZoneInfo) -> None:
    calendar = Calendar(zone)
    for now in times:
        assert calendar.at(now) == {period: period_bounds(period, now, zone) for period in PERIODS}


def test_the_calendar_gives_one_object_a_day() -> None:
    calendar = Calendar()
    assert calendar.at(0.0) is calendar.at(86_399.9)
    assert calendar.at(86_400.0) is not calendar.at(86_399.9)
