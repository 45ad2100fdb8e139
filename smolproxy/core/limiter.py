"""Who is admitted: counts every key's use in memory and holds it against the key's limits.

For one event loop: nothing here waits, so every call is atomic. The books are the store's; this module forgets
everything at a restart and is told again (:meth:`Limiter.seed`).

What counts:

- *parallel*: reservations that are not released, running and waiting alike, of keys without that limit too.
- *rpm*: every admitted request for 60 s from its admission, however it ended. Counted while the key has the limit:
  where it is set newly, the minute before is not known.
- *tpm*: tokens for 60 s from when they settled, and the estimates of what is not settled. Counted as rpm is.
- *budget*: tokens by the calendar period in which they settled, and the estimates. Counted for every key, so a budget
  that is set in the middle of a month knows the month.

A request is admitted while anything is left of its token limits, whatever it is estimated at: a limit that is smaller
than one request would otherwise lock the key out. So limits are overshot by no more than what was in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo

from smolproxy.core.counters import MINUTE, RequestWindow, Spending, TokenWindow
from smolproxy.core.limits import DEFAULT_PERIOD, Limits
from smolproxy.core.periods import Calendar, Period, period_bounds

SOON = 1.0  # seconds: when to try again if that depends on when a running request ends
_JITTER = 1.0  # seconds: a clock that is behind by less is waited for
_GRACE = 86_400.0  # seconds: how much longer than its periods the total of an idle key is kept, as clocks step back
_UNITS = {"rpm": "requests per minute", "tpm": "tokens per minute", "parallel": "requests at once"}


class LimitReached(Exception):
    """A request is refused; the message is for the user.

    :ivar limit: ``rpm``, ``tpm``, ``parallel`` or ``budget``; of several limits that refuse, the one that will for
        longest.
    :ivar value: the limit's value.
    :ivar retry_after: seconds until the limit has room again. Known exactly for rpm and for tokens that have settled;
        where it depends on what still runs, the least it can be, and not below 1. For a limit of 0, which never has
        room, a minute, or the rest of the budget's period.
    """

    def __init__(self, limit: str, value: int, retry_after: float, message: str | None = None) -> None:
        super().__init__(message or f"this key's {limit} limit of {value} is reached")
        self.limit = limit
        self.value = value
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """How a limit stands."""

    limit: int
    remaining: int  # never below 0
    reset_seconds: float  # until all of it is free, if what runs now ended now (parallel: SOON while something runs)


class _Account:
    """What is counted for one key."""

    __slots__ = ("requests", "reserved", "running", "spending", "tokens")

    def __init__(self) -> None:
        self.running = 0  # reservations not released
        self.reserved = 0  # tokens: estimates of reservations not settled
        self.requests: RequestWindow | None = None  # since rpm was first limited
        self.tokens: TokenWindow | None = None  # since tpm was first limited
        self.spending = Spending()


class Reservation:
    """What an admitted request holds: one parallel place, and an estimate of its tokens.

    Every one must be released and settled, or cancelled; all three do their work once, in whatever order and however
    often they are called.
    """

    __slots__ = ("_account", "_at", "_estimate", "_limiter", "_released", "_settled")

    def __init__(self, limiter: Limiter, account: _Account, estimate: int, at: float | None) -> None:
        self._limiter = limiter
        self._account = account
        self._estimate = estimate
        self._at = at  # when it was counted for rpm
        self._released = False
        self._settled = False

    def release(self) -> None:
        """Give the parallel place back."""
        if not self._released:
            self._released = True
            self._account.running -= 1

    def settle(self, tokens: int, now: float) -> None:
        """Replace the estimate by what was really used.

        :param tokens: prompt and completion together.
        :param now: Unix time in seconds.
        """
        if not self._settled:
            self._settled = True
            self._account.reserved -= self._estimate
            self._limiter._spend(self._account, tokens, now)

    def cancel(self) -> None:
        """Undo the admission, as if there had been no request; after :meth:`settle` this only releases."""
        if not self._settled:
            self._settled = True
            self._account.reserved -= self._estimate
            if self._at is not None and self._account.requests is not None:
                self._account.requests.undo(self._at)
        self.release()


class Limiter:
    """The counts of all keys.

    Times are Unix seconds, taken from the clock at the moment of the call. A clock that steps back is survived: the
    sliding minutes then go on from where they were, so nothing counts longer or shorter than it should.

    :param timezone: whose midnights begin the periods of budgets.
    """

    def __init__(self, timezone: tzinfo = timezone.utc) -> None:
        self._accounts: dict[int, _Account] = {}
        self._calendar = Calendar(timezone)
        self._latest = -math.inf  # the clock, as last seen
        self._shift = 0.0  # what the clock has stepped back in all

    def admit(self, key_id: int, limits: Limits, now: float, *, estimate: int) -> Reservation:
        """Admit a request, or refuse it without having counted anything.

        :param limits: the key's limits of this moment.
        :param now: Unix time in seconds.
        :param estimate: tokens that the request will probably use; below 1 counts as 1.
        :raises LimitReached: if a limit leaves no room.
        """
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = _Account()
        at = None
        if (
            limits.rpm_limit is not None
            or limits.tpm_limit is not None
            or limits.parallel_limit is not None
            or limits.budget is not None
        ):
            moment = self._moment(now)
            self._check(account, limits, now, moment)
            if limits.tpm_limit is not None and account.tokens is None:
                account.tokens = TokenWindow()
            if limits.rpm_limit is not None:
                if account.requests is None:
                    account.requests = RequestWindow()
                at = moment
                account.requests.add(at)
        if estimate < 1:
            estimate = 1
        account.running += 1
        account.reserved += estimate
        return Reservation(self, account, estimate, at)

    def status(self, key_id: int, limits: Limits, now: float) -> dict[str, LimitStatus]:
        """Return how the limits that are set stand: some of ``rpm``, ``tpm``, ``parallel``, ``budget``.

        :param now: Unix time in seconds.
        """
        account = self._accounts.get(key_id) or _Account()
        at = self._moment(now)
        found: dict[str, LimitStatus] = {}
        if (limit := limits.rpm_limit) is not None:
            requests = account.requests or RequestWindow()
            found["rpm"] = LimitStatus(limit, max(0, limit - requests.count(at)), requests.reset(at))
        if (limit := limits.tpm_limit) is not None:
            tokens = account.tokens or TokenWindow()
            reset = MINUTE if account.reserved else tokens.reset(at)
            found["tpm"] = LimitStatus(limit, max(0, limit - tokens.total(at) - account.reserved), reset)
        if (limit := limits.parallel_limit) is not None:
            found["parallel"] = LimitStatus(limit, max(0, limit - account.running), SOON if account.running else 0.0)
        if (limit := limits.budget) is not None:
            used, period = self._spent(account, limits, now)
            found["budget"] = LimitStatus(limit, max(0, limit - used - account.reserved), period.end - now)
        return found

    def seed(
        self,
        key_id: int,
        now: float,
        *,
        requests: Iterable[float] = (),
        tokens: Iterable[tuple[float, int]] = (),
        period_tokens: Mapping[str, tuple[float, int]] | None = None,
    ) -> None:
        """Tell what a key used before a restart; replaces what is counted, but not what is running.

        :param now: Unix time in seconds. What is older than a minute is left out; a time after ``now``, from a clock
            that has stepped back since, counts as ``now``.
        :param requests: when requests of the last minute were admitted, Unix seconds.
        :param tokens: when how many tokens of the last minute settled.
        :param period_tokens: ``day``, ``week``, ``month`` -> a moment of that period (its beginning, usually) and the
            tokens that settled in it until now.
        """
        account = self._accounts.setdefault(key_id, _Account())
        at = self._moment(now)
        past = sorted(min(when, now) for when in requests if when + MINUTE > now)
        account.requests = RequestWindow(when - now + at if at != now else when for when in past)
        account.tokens = TokenWindow()
        for when, count in sorted(tokens):
            if when + MINUTE > now:
                account.tokens.add(min(when, now) - now + at, count)
        for period, (start, count) in (period_tokens or {}).items():
            first = period_bounds(period, start, self._calendar.zone).start
            account.spending.put(self._calendar.at(now), period, first, count)

    def prune(self, now: float) -> None:
        """Forget the keys of which nothing counts any more; to be called now and then, every few minutes.

        :param now: Unix time in seconds.
        """
        at = self._moment(now)
        periods = Calendar(self._calendar.zone).at(now - _GRACE)
        for key_id, account in list(self._accounts.items()):
            if account.requests is not None and not account.requests.count(at):
                account.requests = None
            if account.tokens is not None and not account.tokens.total(at) and not account.reserved:
                account.tokens = None
            in_use = account.running or account.reserved or account.requests or account.tokens
            if not in_use and account.spending.idle(periods):
                del self._accounts[key_id]

    def forget(self, key_id: int) -> None:
        """Forget a key that was deleted; what it still runs ends as it would."""
        self._accounts.pop(key_id, None)

    def _check(self, account: _Account, limits: Limits, now: float, at: float) -> None:
        reached: list[tuple[float, str, int, str]] = []  # seconds, limit, value, unit
        if (limit := limits.parallel_limit) is not None and account.running >= limit:
            reached.append((SOON if limit else MINUTE, "parallel", limit, _UNITS["parallel"]))
        if (limit := limits.rpm_limit) is not None:
            requests = account.requests or RequestWindow()
            if requests.count(at) >= limit:
                reached.append((requests.wait(limit, at), "rpm", limit, _UNITS["rpm"]))
        if (limit := limits.tpm_limit) is not None:
            tokens = account.tokens or TokenWindow()
            if tokens.total(at) + account.reserved >= limit:
                wait = tokens.wait(limit - account.reserved, at)
                if wait is None:  # what runs has all of it: not before what has settled leaves room, that is sure
                    wait = max(SOON, tokens.wait(limit, at) or 0.0) if limit else MINUTE
                reached.append((wait, "tpm", limit, _UNITS["tpm"]))
        if (limit := limits.budget) is not None:
            used, period = self._spent(account, limits, now)
            if used + account.reserved >= limit:
                unit = f"tokens per {limits.budget_period or DEFAULT_PERIOD}"
                reached.append((period.end - now if used >= limit else SOON, "budget", limit, unit))
        if reached:
            wait, name, value, unit = max(reached)
            raise LimitReached(name, value, wait, _message(name, value, unit, wait, now))

    def _spend(self, account: _Account, tokens: int, now: float) -> None:
        account.spending.add(self._calendar.at(now), tokens)
        if account.tokens is not None:
            # A request that ends may well tell an older time than one that begins; that is no step of the clock.
            account.tokens.add(self._moment(max(now, self._latest)), tokens)

    def _spent(self, account: _Account, limits: Limits, now: float) -> tuple[int, Period]:
        period = limits.budget_period or DEFAULT_PERIOD
        periods = self._calendar.at(now)
        return account.spending.total(periods, period), periods[period]

    def _moment(self, now: float) -> float:
        """Return the time of the sliding minutes: the clock's, but it never steps back."""
        behind = self._latest - now
        if behind > 0:
            if behind < _JITTER:
                return self._latest + self._shift
            self._shift += behind
        self._latest = now
        return now + self._shift


def _message(name: str, value: int, unit: str, wait: float, now: float) -> str:
    reached = f"this key's limit of {value} {unit} ({name}) is reached"
    if not value:
        return reached
    if name == "parallel":
        return f"{reached}; it is free again when one of them ends"
    if wait < 3600:
        return f"{reached}; it is free again in {math.ceil(wait)} s"
    free = datetime.fromtimestamp(math.ceil(now + wait), timezone.utc)
    return f"{reached}; it is free again at {free:%Y-%m-%dT%H:%M:%SZ}"
