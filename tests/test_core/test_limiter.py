from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.limiter import SOON, Limiter, LimitReached, LimitStatus, Reservation
from smolproxy.core.limits import Limits

KEY = 7
NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z, a Friday
DAY = 86_400.0
ALL = Limits(rpm_limit=3, tpm_limit=100, parallel_limit=2, budget=1000, budget_period="day")

steps = st.one_of(st.sampled_from([0.0, 0.001, 1.0, 30.0, 59.999, 60.0]), st.floats(0, 70))


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def admitted(limiter: Limiter, limits: Limits, now: float, times: int, estimate: int = 1) -> list[Reservation]:
    """Ask ``times`` times at once; return what was admitted."""
    asked = [attempt(limiter, limits, now, estimate) for _ in range(times)]
    return [found for found in asked if isinstance(found, Reservation)]


def attempt(limiter: Limiter, limits: Limits, now: float, estimate: int = 1) -> Reservation | LimitReached:
    try:
        return limiter.admit(KEY, limits, now, estimate=estimate)
    except LimitReached as reached:
        return reached


def refused(limiter: Limiter, limits: Limits, now: float) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        limiter.admit(KEY, limits, now, estimate=1)
    return caught.value


def spend(limiter: Limiter, limits: Limits, now: float, tokens: int) -> None:
    """One request from its beginning to its end."""
    reservation = limiter.admit(KEY, limits, now, estimate=tokens)
    reservation.release()
    reservation.settle(tokens, now)


def remaining(limiter: Limiter, limits: Limits, now: float, limit: str) -> int:
    return limiter.status(KEY, limits, now)[limit].remaining


# -- each limit admits exactly what it says


@pytest.mark.parametrize("limit", [0, 1, 2, 10])
@pytest.mark.parametrize("name", ["rpm_limit", "tpm_limit", "parallel_limit", "budget"])
def test_exactly_n_of_10_n_at_once(name: str, limit: int) -> None:
    fields: dict[str, Any] = {name: limit}
    assert len(admitted(Limiter(), Limits(**fields), NOW, 10 * limit + 10)) == limit


def test_no_limits_admit_everything() -> None:
    limiter = Limiter()
    assert len(admitted(limiter, Limits(), NOW, 10_000, estimate=10**9)) == 10_000
    assert limiter.status(KEY, Limits(), NOW) == {}


def test_keys_do_not_share() -> None:
    limiter = Limiter()
    assert len(admitted(limiter, Limits(rpm_limit=1), NOW, 5)) == 1
    limiter.admit(KEY + 1, Limits(rpm_limit=1), NOW, estimate=1)


@pytest.mark.parametrize("name", ["rpm_limit", "tpm_limit", "parallel_limit", "budget"])
def test_a_limit_can_be_lowered_raised_and_cleared_under_way(name: str) -> None:
    limiter = Limiter()

    def limits(value: int | None) -> Limits:
        fields: dict[str, Any] = {name: value}
        return Limits(**fields)

    assert len(admitted(limiter, limits(5), NOW, 10)) == 5
    assert admitted(limiter, limits(2), NOW, 10) == []
    assert len(admitted(limiter, limits(6), NOW, 10)) == 1
    assert len(admitted(limiter, limits(None), NOW, 10)) == 10
    # rpm is counted only where it is limited; the others know what they admitted meanwhile
    assert len(admitted(limiter, limits(20), NOW, 50)) == (14 if name == "rpm_limit" else 4)


# -- a refusal uses nothing


@pytest.mark.parametrize(
    "limits",
    [
        Limits(rpm_limit=0, tpm_limit=5, parallel_limit=5, budget=5),
        Limits(rpm_limit=5, tpm_limit=0, parallel_limit=5, budget=5),
        Limits(rpm_limit=5, tpm_limit=5, parallel_limit=0, budget=5),
        Limits(rpm_limit=5, tpm_limit=5, parallel_limit=5, budget=0),
    ],
)
def test_a_request_refused_by_one_limit_uses_none_of_another(limits: Limits) -> None:
    limiter = Limiter()
    before = limiter.status(KEY, limits, NOW)
    assert admitted(limiter, limits, NOW, 20) == []
    assert limiter.status(KEY, limits, NOW) == before
    assert len(admitted(limiter, Limits(rpm_limit=5, tpm_limit=5, parallel_limit=5, budget=5), NOW, 20)) == 5


# -- the sliding minute of requests


@settings(deadline=None)
@given(st.integers(0, 5), st.lists(steps, max_size=60))
def test_never_more_than_n_in_any_minute_and_never_fewer_than_there_could_be(limit: int, waits: list[float]) -> None:
    limiter, limits, now = Limiter(), Limits(rpm_limit=limit), NOW
    times: list[float] = []
    for wait in waits:
        now += wait
        recent = [time for time in times if time + 60 > now]
        status = limiter.status(KEY, limits, now)["rpm"]
        assert status.remaining == limit - len(recent)
        assert status.reset_seconds == (recent[-1] + 60 - now if recent else 0.0)
        found = attempt(limiter, limits, now)
        if isinstance(found, LimitReached):
            assert len(recent) == limit
            assert (found.limit, found.value) == ("rpm", limit)
            assert found.retry_after == (recent[0] + 60 - now if limit else 60.0)
        else:
            assert len(recent) < limit
            times.append(now)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.lists(steps, min_size=1, max_size=30))
def test_retry_after_is_when_it_is_free(limit: int, lowered_by: int, waits: list[float]) -> None:
    limiter, now = Limiter(), NOW
    for wait in waits:
        now += wait
        admitted(limiter, Limits(rpm_limit=limit + lowered_by), now, 2)
    limits = Limits(rpm_limit=limit)
    found = attempt(limiter, limits, now)
    if isinstance(found, LimitReached):
        assert 0 < found.retry_after <= 60
        refused(limiter, limits, now + found.retry_after - 1e-5)
        limiter.admit(KEY, limits, now + found.retry_after + 1e-5, estimate=1)


def test_a_request_counts_however_it_ended() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=1)
    reservation = limiter.admit(KEY, limits, NOW, estimate=1)
    reservation.release()
    reservation.settle(0, NOW)
    assert refused(limiter, limits, NOW + 59.9).limit == "rpm"
    limiter.admit(KEY, limits, NOW + 60, estimate=1)


# -- tokens per minute


def test_the_estimate_is_held_until_the_real_count_is_known() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=100)
    first = limiter.admit(KEY, limits, NOW, estimate=60)
    assert remaining(limiter, limits, NOW, "tpm") == 40
    second = limiter.admit(KEY, limits, NOW, estimate=60)  # there is room for some of it
    assert limiter.status(KEY, limits, NOW)["tpm"] == LimitStatus(100, 0, 60.0)
    assert refused(limiter, limits, NOW).retry_after == SOON  # nobody knows what they will really use
    first.settle(10, NOW + 5)
    assert remaining(limiter, limits, NOW + 5, "tpm") == 30
    second.settle(500, NOW + 10)  # never cut
    reached = refused(limiter, limits, NOW + 10)
    assert (reached.limit, reached.value, reached.retry_after) == ("tpm", 100, 60.0)
    assert refused(limiter, limits, NOW + 69.9).retry_after == pytest.approx(0.1, abs=1e-5)
    assert remaining(limiter, limits, NOW + 70, "tpm") == 100


def test_the_wait_counts_what_runs() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=100)
    running = limiter.admit(KEY, limits, NOW, estimate=45)
    spend(limiter, limits, NOW, 30)
    spend(limiter, limits, NOW + 20, 30)
    assert refused(limiter, limits, NOW + 30).retry_after == 30.0
    running.settle(75, NOW + 30)  # 135 in all: 105 when the first are gone
    assert refused(limiter, limits, NOW + 30).retry_after == 50.0


def test_the_wait_lasts_until_there_is_room_for_one() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=10)
    spend(limiter, limits, NOW, 5)
    spend(limiter, limits, NOW + 10, 10)
    assert refused(limiter, limits, NOW + 10).retry_after == 60.0  # at 50 s the 10 are still there


def test_the_wait_is_no_shorter_than_for_what_has_settled() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=100)
    limiter.admit(KEY, limits, NOW, estimate=60)
    last = limiter.admit(KEY, limits, NOW, estimate=90)
    limiter.admit(KEY, Limits(), NOW, estimate=200)
    last.settle(120, NOW + 5)
    assert refused(limiter, limits, NOW + 5).retry_after == 60.0


def test_no_tokens_leave_nothing_behind() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=100)
    spend(limiter, limits, NOW, 10)
    spend(limiter, limits, NOW + 30, 0)
    assert limiter.status(KEY, limits, NOW + 30)["tpm"] == LimitStatus(100, 90, 30.0)


def test_a_request_larger_than_the_limit_is_admitted_alone() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=100, budget=100)
    assert len(admitted(limiter, limits, NOW, 5, estimate=10**6)) == 1


def test_an_estimate_below_1_counts_as_1() -> None:
    limiter, limits = Limiter(), Limits(tpm_limit=3)
    assert len(admitted(limiter, limits, NOW, 5, estimate=-5)) == 3


@settings(deadline=None)
@given(
    st.integers(0, 200),
    st.lists(st.tuples(steps, st.integers(0, 120), st.integers(0, 200), st.booleans()), max_size=60),
)
def test_tokens_in_any_minute(limit: int, script: list[tuple[float, int, int, bool]]) -> None:
    """Against a plain list: admitted if and only if there is room, give or take the quarter second of an entry."""
    limiter, limits, now = Limiter(), Limits(tpm_limit=limit), NOW
    settled: list[tuple[float, int]] = []
    running: list[tuple[Reservation, int, int]] = []
    for wait, estimate, tokens, ends in script:
        now += wait
        held = sum(max(1, estimate) for _, estimate, _ in running)
        least = held + sum(count for when, count in settled if when + 60 > now)
        most = held + sum(count for when, count in settled if when + 60.25 > now)
        assert limit - most <= remaining(limiter, limits, now, "tpm") or limit < most
        assert remaining(limiter, limits, now, "tpm") <= max(0, limit - least)
        found = attempt(limiter, limits, now, estimate)
        if isinstance(found, LimitReached):
            assert most >= limit
            assert found.retry_after > 0
        else:
            assert least < limit
            running.append((found, estimate, tokens))
        if ends and running:
            reservation, _, used = running.pop(0)
            reservation.settle(used, now)
            settled.append((now, used))


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 50)), min_size=1, max_size=200))
def test_the_wait_for_tokens_is_right_within_a_quarter_second(script: list[tuple[float, int]]) -> None:
    limiter, now = Limiter(), NOW
    settled: list[tuple[float, int]] = []
    for wait, tokens in script:
        now += wait
        spend(limiter, Limits(tpm_limit=10**9), now, tokens)
        settled.append((now, tokens))
    limits = Limits(tpm_limit=20)
    found = attempt(limiter, limits, now)
    if isinstance(found, LimitReached):
        free = next(when + 60 for when, _ in settled if sum(n for later, n in settled if later > when) < 20)
        assert -1e-5 <= now + found.retry_after - free <= 0.25 + 1e-5
        limiter.admit(KEY, limits, now + found.retry_after + 1e-5, estimate=1)


# -- parallel requests


@settings(deadline=None)
@given(st.integers(0, 4), st.lists(st.sampled_from(["admit", "release", "settle", "cancel", "again"]), max_size=80))
def test_parallel_is_never_exceeded_and_ends_at_zero(limit: int, script: list[str]) -> None:
    limiter, limits = Limiter(), Limits(parallel_limit=limit)
    running: list[Reservation] = []
    ended: list[Reservation] = []
    for action in script:
        if action == "admit":
            found = admitted(limiter, limits, NOW, 1)
            assert bool(found) is (len(running) < limit)
            running += found
        elif action == "again":
            for reservation in ended:
                reservation.release()
                reservation.cancel()
        elif action == "settle":
            for reservation in running:  # books only: the place stays taken
                reservation.settle(1, NOW)
        elif running:
            ended.append(running.pop())
            ended[-1].release() if action == "release" else ended[-1].cancel()
        assert remaining(limiter, limits, NOW, "parallel") == limit - len(running)
    for reservation in running:
        reservation.release()
    status = limiter.status(KEY, limits, NOW)["parallel"]
    assert status == LimitStatus(limit, limit, 0.0)


def test_requests_admitted_without_a_limit_count_when_one_is_set() -> None:
    limiter = Limiter()
    running = admitted(limiter, Limits(), NOW, 3)
    limits = Limits(parallel_limit=3)
    reached = refused(limiter, limits, NOW)
    assert (reached.limit, reached.value, reached.retry_after) == ("parallel", 3, 1.0)
    running[0].release()  # free at once, though its tokens are not known yet
    limiter.admit(KEY, limits, NOW, estimate=1)


# -- the ends of a reservation


ENDS: dict[str, Callable[[Reservation, float], None]] = {
    "release": lambda reservation, now: reservation.release(),
    "settle": lambda reservation, now: reservation.settle(13, now),
    "cancel": lambda reservation, now: reservation.cancel(),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(ENDS)), st.floats(0, 5)), min_size=1, max_size=12))
def test_each_end_does_its_work_once(script: list[tuple[str, float]]) -> None:
    limiter, now = Limiter(), NOW
    reservation = limiter.admit(KEY, ALL, now, estimate=40)
    settled: str | None = None
    released = False
    for name, wait in script:
        now += wait
        ENDS[name](reservation, now)
        if name in ("settle", "cancel"):
            settled = settled or name
        released = released or name in ("release", "cancel")
    used = {None: 40, "settle": 13, "cancel": 0}[settled]
    status = limiter.status(KEY, ALL, now)
    assert status["parallel"].remaining == (2 if released else 1)
    assert status["rpm"].remaining == (3 if settled == "cancel" else 2)
    assert status["tpm"].remaining == 100 - used
    assert status["budget"].remaining == 1000 - used


def test_cancel_leaves_everything_as_it_was() -> None:
    limiter = Limiter()
    spend(limiter, ALL, NOW, 20)
    before = limiter.status(KEY, ALL, NOW + 1)
    first = limiter.admit(KEY, ALL, NOW + 1, estimate=5)
    second = limiter.admit(KEY, ALL, NOW + 1, estimate=5)
    first.cancel()
    second.cancel()
    assert limiter.status(KEY, ALL, NOW + 1) == before


def test_cancel_takes_back_the_right_request() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=2)
    first = limiter.admit(KEY, limits, NOW, estimate=1)
    limiter.admit(KEY, limits, NOW + 30, estimate=1)
    first.cancel()
    limiter.admit(KEY, limits, NOW + 40, estimate=1)
    assert refused(limiter, limits, NOW + 61).retry_after == pytest.approx(29)


def test_cancel_of_one_in_the_middle() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=3)
    requests = [limiter.admit(KEY, limits, NOW + wait, estimate=1) for wait in (0, 10, 20)]
    requests[1].cancel()
    limiter.admit(KEY, limits, NOW + 30, estimate=1)
    assert refused(limiter, limits, NOW + 30).retry_after == 30.0


def test_cancel_long_after() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=2)
    waiting = limiter.admit(KEY, limits, NOW, estimate=1)
    limiter.admit(KEY, limits, NOW + 100, estimate=1)
    waiting.cancel()
    assert remaining(limiter, limits, NOW + 100, "rpm") == 1


# -- budgets


@pytest.mark.parametrize(
    ("period", "now", "end"),
    [
        ("day", "2027-01-15T08:00+00:00", "2027-01-16T00:00+00:00"),
        ("week", "2027-01-15T08:00+00:00", "2027-01-18T00:00+00:00"),
        ("month", "2027-01-15T08:00+00:00", "2027-02-01T00:00+00:00"),
        (None, "2027-01-15T08:00+00:00", "2027-02-01T00:00+00:00"),
    ],
)
def test_a_budget_is_free_again_with_its_period(period: str | None, now: str, end: str) -> None:
    limiter, limits = Limiter(), Limits(budget=100, budget_period=period)
    at, after = unix(now), unix(end)
    spend(limiter, limits, at, 60)
    assert limiter.status(KEY, limits, at)["budget"] == LimitStatus(100, 40, after - at)
    spend(limiter, limits, at, 90)
    reached = refused(limiter, limits, at)
    assert (reached.limit, reached.value, reached.retry_after) == ("budget", 100, after - at)
    assert refused(limiter, limits, after - 0.5).retry_after == 0.5
    assert remaining(limiter, limits, after, "budget") == 100
    limiter.admit(KEY, limits, after, estimate=1)


def test_the_budget_follows_the_time_zone() -> None:
    limiter, limits = Limiter(ZoneInfo("Europe/Berlin")), Limits(budget=1, budget_period="day")
    spend(limiter, limits, unix("2026-10-25T00:00+02:00"), 1)
    reached = refused(limiter, limits, unix("2026-10-25T00:00+02:00"))
    assert reached.retry_after == 25 * 3600
    limiter.admit(KEY, limits, unix("2026-10-26T00:00+01:00"), estimate=1)


def test_tokens_count_in_the_period_in_which_they_settle() -> None:
    limiter, limits = Limiter(), Limits(budget=100, budget_period="day")
    midnight = unix("2027-01-16T00:00+00:00")
    running = limiter.admit(KEY, limits, midnight - 1, estimate=30)
    assert remaining(limiter, limits, midnight, "budget") == 70
    running.settle(50, midnight + 1)
    assert remaining(limiter, limits, midnight + 1, "budget") == 50


def test_what_runs_is_held_against_the_budget() -> None:
    limiter, limits = Limiter(), Limits(budget=100)
    running = limiter.admit(KEY, limits, NOW, estimate=100)
    assert refused(limiter, limits, NOW).retry_after == SOON
    running.settle(99, NOW)
    limiter.admit(KEY, limits, NOW, estimate=1)


def test_a_budget_set_late_knows_what_was_used() -> None:
    limiter = Limiter()
    spend(limiter, Limits(), NOW - 2 * DAY, 30)
    spend(limiter, Limits(), NOW, 5)
    assert remaining(limiter, Limits(budget=100, budget_period="day"), NOW, "budget") == 95
    assert remaining(limiter, Limits(budget=100, budget_period="month"), NOW, "budget") == 65


@settings(deadline=None)
@given(
    st.sampled_from(["day", "week", "month"]),
    st.lists(st.tuples(st.sampled_from([0.0, 3600.0, DAY / 2, 3 * DAY, 20 * DAY]), st.integers(0, 80)), max_size=40),
)
def test_budgets_against_a_plain_sum(period: str, script: list[tuple[float, int]]) -> None:
    limiter, limits, now = Limiter(), Limits(budget=200, budget_period=period), NOW
    form = {"day": "%Y-%m-%d", "week": "%G-%V", "month": "%Y-%m"}[period]
    totals: dict[str, int] = {}
    for wait, tokens in script:
        now += wait
        name = datetime.fromtimestamp(now, timezone.utc).strftime(form)
        used = totals.get(name, 0)
        assert remaining(limiter, limits, now, "budget") == max(0, 200 - used)
        found = attempt(limiter, limits, now, tokens)
        assert isinstance(found, Reservation) is (used < 200)
        if isinstance(found, Reservation):
            found.settle(tokens, now)
            totals[name] = used + tokens


# -- a clock that steps


@settings(deadline=None)
@given(
    st.integers(1, 4), st.lists(st.tuples(steps, st.sampled_from([0, 0, 0, 0.01, 0.9, 2, 59, 3600, 9e7])), max_size=50)
)
def test_steps_back_never_admit_twice_over(limit: int, script: list[tuple[float, float]]) -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=limit)
    passed, behind = 0.0, 0.0
    times: list[float] = []
    for wait, step in script:
        passed += wait
        behind += step
        if admitted(limiter, limits, NOW + passed - behind, 1):
            times.append(passed)
            assert sum(time > passed - 60 + 1e-3 for time in times) <= limit


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1e8, -3600.0, -61.0, -5.0, -0.5, 0.0, 5.0, 3600.0, 1e8]), max_size=10))
def test_steps_lock_nobody_out(offsets: list[float]) -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=1, tpm_limit=10)
    passed, offset = 0.0, 0.0
    spend(limiter, limits, NOW, 10)
    for step in offsets:
        offset += step
        found = attempt(limiter, limits, NOW + passed + offset)
        if isinstance(found, Reservation):
            assert step > 60
            found.settle(10, NOW + passed + offset)
        else:
            assert found.retry_after <= 61.25  # a jitter of less than a second is waited for
        passed += 61.3
        spend(limiter, limits, NOW + passed + offset, 10)


def test_a_late_settlement_with_an_old_time_is_no_step() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=1, tpm_limit=100)
    old = limiter.admit(KEY, Limits(tpm_limit=100), NOW, estimate=1)
    limiter.admit(KEY, limits, NOW + 500, estimate=1).settle(1, NOW + 500)
    old.settle(50, NOW + 1)
    assert refused(limiter, limits, NOW + 559).limit == "rpm"
    assert remaining(limiter, limits, NOW + 559, "tpm") == 49
    assert remaining(limiter, limits, NOW + 560, "tpm") == 100


def test_a_step_back_over_midnight_finds_each_days_total_again() -> None:
    limiter, limits = Limiter(), Limits(budget=100, budget_period="day")
    midnight = unix("2027-01-16T00:00+00:00")
    spend(limiter, limits, midnight - 1, 100)
    spend(limiter, limits, midnight + 1, 30)
    assert refused(limiter, limits, midnight - 2).limit == "budget"
    assert remaining(limiter, limits, midnight + 2, "budget") == 70


@pytest.mark.parametrize("back", [DAY, 10 * DAY, 400 * DAY])
def test_a_step_back_is_no_new_budget_and_no_lock(back: float) -> None:
    limiter, limits = Limiter(), Limits(budget=100, budget_period="day")
    spend(limiter, limits, NOW, 100)
    assert refused(limiter, limits, NOW - back).retry_after == 16 * 3600
    assert remaining(limiter, limits, NOW - back - DAY, "budget") == 0
    assert remaining(limiter, limits, NOW + DAY, "budget") == 100


def test_before_all_known_periods_the_earliest_goes_on() -> None:
    limiter, limits = Limiter(), Limits(budget=100, budget_period="day")
    spend(limiter, limits, NOW, 100)
    spend(limiter, limits, NOW + DAY, 30)
    assert refused(limiter, limits, NOW - DAY).limit == "budget"


def test_pruning_at_midnight_does_not_forget_a_day_that_may_come_again() -> None:
    limiter, limits = Limiter(), Limits(budget=100)
    month = unix("2027-02-01T00:00+00:00")
    spend(limiter, limits, month - 1, 100)
    limiter.prune(month + 3600)
    assert refused(limiter, limits, month - 1).limit == "budget"


def test_a_clock_that_trembles_does_not_make_the_minute_shorter() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=1)
    limiter.admit(KEY, limits, NOW, estimate=1)
    for number in range(590):
        refused(limiter, limits, NOW + number / 10 - (number % 2) * 0.5)


def test_a_wrong_year_is_forgotten() -> None:
    limiter, limits = Limiter(), Limits(budget=100)
    spend(limiter, limits, NOW, 30)
    spend(limiter, limits, NOW + 365 * DAY, 100)
    assert refused(limiter, limits, NOW + 365 * DAY).limit == "budget"
    assert remaining(limiter, limits, NOW + 60, "budget") == 70


# -- which limit is told, and how


def test_of_several_limits_the_one_that_holds_longest_is_told() -> None:
    limiter = Limiter()
    limits = Limits(rpm_limit=1, tpm_limit=1, parallel_limit=1, budget=1, budget_period="day")
    spend(limiter, limits, NOW, 1)
    assert refused(limiter, limits, NOW + 1).limit == "budget"
    spend(limiter, Limits(rpm_limit=9, tpm_limit=9), NOW + 30, 1)
    assert refused(limiter, Limits(rpm_limit=1, tpm_limit=2, parallel_limit=9), NOW + 31).limit == "rpm"
    assert refused(limiter, Limits(rpm_limit=2, tpm_limit=1, parallel_limit=9), NOW + 31).limit == "tpm"
    assert refused(limiter, Limits(rpm_limit=1, parallel_limit=0), NOW + 59).limit == "parallel"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(rpm_limit=2), "limit of 2 requests per minute (rpm) is reached; it is free again in 60 s"),
        (Limits(tpm_limit=10), "limit of 10 tokens per minute (tpm) is reached; it is free again in 60 s"),
        (Limits(parallel_limit=1), "limit of 1 requests at once (parallel) is reached; it is free again when one"),
        (Limits(budget=5), "limit of 5 tokens per month (budget) is reached; it is free again at 2027-02-01T00:00:00Z"),
        (
            Limits(budget=5, budget_period="day"),
            "limit of 5 tokens per day (budget) is reached; it is free again at 2027-01-16T00:00:00Z",
        ),
        (Limits(rpm_limit=0), "limit of 0 requests per minute (rpm) is reached"),
    ],
)
def test_messages(limits: Limits, message: str) -> None:
    limiter = Limiter()
    for reservation in admitted(limiter, limits, NOW, 2):
        reservation.settle(5, NOW)
    assert message in str(refused(limiter, limits, NOW))


def test_a_refusal_has_a_message_of_its_own() -> None:
    assert str(LimitReached("rpm", 5, 1.0)) == "this key's rpm limit of 5 is reached"


# -- status


def test_status_has_what_is_set() -> None:
    limiter = Limiter()
    assert limiter.status(KEY, ALL, NOW) == {
        "rpm": LimitStatus(3, 3, 0.0),
        "tpm": LimitStatus(100, 100, 0.0),
        "parallel": LimitStatus(2, 2, 0.0),
        "budget": LimitStatus(1000, 1000, 16 * 3600),
    }
    spend(limiter, ALL, NOW, 30)
    limiter.admit(KEY, ALL, NOW + 10, estimate=20)
    assert limiter.status(KEY, ALL, NOW + 20) == {
        "rpm": LimitStatus(3, 1, 50.0),
        "tpm": LimitStatus(100, 50, 60.0),
        "parallel": LimitStatus(2, 1, SOON),
        "budget": LimitStatus(1000, 950, 16 * 3600 - 20),
    }
    assert list(limiter.status(KEY, Limits(tpm_limit=0), NOW + 20)) == ["tpm"]


# -- restart


def test_counts_survive_a_restart() -> None:
    before, after = Limiter(), Limiter()
    for wait in (0, 10, 20):
        spend(before, Limits(rpm_limit=9, tpm_limit=999, budget=999), NOW + wait, 5)
    after.seed(
        KEY,
        NOW + 30,
        requests=[NOW + 20, NOW, NOW + 10, NOW - 90],
        tokens=[(NOW + 20, 5), (NOW, 5), (NOW + 10, 5), (NOW - 90, 1000)],
        period_tokens={"day": (unix("2027-01-15T00:00+00:00"), 15), "month": (unix("2027-01-01T00:00+00:00"), 15)},
    )
    for when in (30, 61, 75, 100):
        for period in ("day", "month"):
            limits = Limits(rpm_limit=9, tpm_limit=999, budget=999, budget_period=period)
            assert after.status(KEY, limits, NOW + when) == before.status(KEY, limits, NOW + when)
    spend(after, Limits(), NOW + 100, 4)
    assert remaining(after, Limits(budget=100, budget_period="day"), NOW + 100, "budget") == 81


def test_seeding_replaces_what_is_counted_but_not_what_runs() -> None:
    limiter = Limiter()
    spend(limiter, ALL, NOW, 50)
    limiter.admit(KEY, ALL, NOW, estimate=10)
    limiter.seed(KEY, NOW, requests=[NOW], tokens=[(NOW, 7)], period_tokens={"day": (NOW, 9)})
    status = limiter.status(KEY, ALL, NOW)
    assert {name: found.remaining for name, found in status.items()} == {
        "rpm": 2,
        "tpm": 83,
        "parallel": 1,
        "budget": 981,
    }


def test_a_total_of_yesterday_is_not_todays() -> None:
    limiter = Limiter()
    limiter.seed(KEY, NOW, period_tokens={"day": (NOW - DAY, 500)})
    assert remaining(limiter, ALL, NOW, "budget") == 1000


def test_rows_from_the_future_lock_nobody_out() -> None:
    limiter = Limiter()
    limits = Limits(rpm_limit=1, tpm_limit=1)
    limiter.seed(KEY, NOW, requests=[NOW + 3600], tokens=[(NOW + 3600, 5)])
    assert refused(limiter, limits, NOW).retry_after == 60.0
    limiter.admit(KEY, limits, NOW + 60, estimate=1)


def test_seeding_after_a_step_back() -> None:
    limiter = Limiter()
    limits = Limits(rpm_limit=1, tpm_limit=100)
    limiter.admit(KEY + 1, limits, NOW + 3600, estimate=1)
    limiter.seed(KEY, NOW, requests=[NOW - 20], tokens=[(NOW - 20, 100)])
    for name in ("rpm", "tpm"):
        assert limiter.status(KEY, limits, NOW)[name].reset_seconds == 40.0
    assert refused(limiter, limits, NOW).retry_after == 40.0
    limiter.admit(KEY, limits, NOW + 40, estimate=1)


# -- memory


def test_idle_keys_are_forgotten() -> None:
    limiter = Limiter()
    for key_id in range(100):
        reservation = limiter.admit(key_id, ALL, NOW, estimate=1)
        reservation.release()
        reservation.settle(0 if key_id % 2 else 3, NOW)
    running = limiter.admit(1000, Limits(), NOW, estimate=1)
    limiter.prune(NOW + 1)
    assert len(limiter._accounts) == 101  # the minute is not over
    limiter.prune(NOW + 120)
    assert len(limiter._accounts) == 51  # those with tokens in this month, and what runs
    limiter.prune(NOW + 40 * DAY)
    assert list(limiter._accounts) == [1000]
    running.release()
    limiter.prune(NOW + 40 * DAY)
    assert list(limiter._accounts) == [1000]  # its tokens are still to come
    running.settle(0, NOW + 40 * DAY)
    limiter.prune(NOW + 40 * DAY)
    assert not limiter._accounts


def test_pruning_loses_no_count() -> None:
    limiter = Limiter()
    spend(limiter, ALL, NOW, 30)
    limiter.admit(KEY, ALL, NOW, estimate=20)
    before = limiter.status(KEY, ALL, NOW + 1)
    limiter.prune(NOW + 1)
    assert limiter.status(KEY, ALL, NOW + 1) == before
    limiter.prune(NOW + 3600)
    assert remaining(limiter, ALL, NOW + 3600, "budget") == 950


def test_pruning_leaves_what_runs() -> None:
    limiter, limits = Limiter(), Limits(parallel_limit=1, tpm_limit=100)
    running = limiter.admit(KEY, limits, NOW, estimate=1)
    limiter.prune(NOW + 3600)
    running.settle(40, NOW + 3600)
    assert remaining(limiter, limits, NOW + 3600, "tpm") == 60
    limiter.prune(NOW + 60 * DAY)
    assert refused(limiter, limits, NOW + 60 * DAY).limit == "parallel"


def test_a_forgotten_key_begins_anew_and_what_it_runs_ends() -> None:
    limiter = Limiter()
    running = admitted(limiter, ALL, NOW, 9)
    limiter.forget(KEY)
    limiter.forget(KEY)
    assert len(admitted(limiter, ALL, NOW, 9)) == 2
    for reservation in running:
        reservation.release()
        reservation.settle(5, NOW)
    assert remaining(limiter, ALL, NOW, "parallel") == 0


def test_memory_of_a_busy_key_is_bounded() -> None:
    limiter, limits = Limiter(), Limits(rpm_limit=50, tpm_limit=10**9)
    for number in range(20_000):
        for reservation in admitted(limiter, limits, NOW + number / 100, 1):
            reservation.release()
        limiter.admit(KEY, Limits(), NOW + number / 100, estimate=1).settle(1, NOW + number / 100)
    account = limiter._accounts[KEY]
    assert account.requests is not None
    assert account.tokens is not None
    assert len(account.requests._times) <= 50
    assert len(account.tokens._entries) <= 242
    for number in range(1000):  # nobody asks for its tokens any more
        limiter.admit(KEY, Limits(), NOW + 300 + number, estimate=1).settle(1, NOW + 300 + number)
    assert len(account.tokens._entries) <= 242
    for day in range(1000):
        limiter.admit(KEY, Limits(), NOW + day * DAY, estimate=1).settle(1, NOW + day * DAY)
    assert all(len(totals) <= 4 for totals in account.spending._totals.values())
