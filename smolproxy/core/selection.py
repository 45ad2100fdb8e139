"""Which server gets a request: one that is up, with free slots, with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# States in which a server can be expected to answer; the others are tried only if there is nothing better.
_READY = ("up", "busy", "unknown")


class Candidate(Protocol):
    """What selection has to know of a server."""

    @property
    def state(self) -> str:
        """One of the states of ``GET /admin/servers``."""

    @property
    def slots(self) -> int | None:
        """Parallel sequences, ``None`` if not known."""

    @property
    def in_flight(self) -> int:
        """Requests that smolproxy has there now."""


C = TypeVar("C", bound=Candidate)


def choose(servers: Sequence[C], turn: int, tried: Sequence[C] = ()) -> C | None:
    """Return the server for the next request, ``None`` if there is none left to try.

    The order: not tried yet, up before anything else, a free slot, fewest in flight, round robin.

    :param turn: a number that grows by one with each request; it breaks ties.
    :param tried: servers that this request has already failed on.
    """
    candidates = [server for server in servers if server not in tried and server.state != "disabled"]
    if not candidates:
        return None
    if len(candidates) == 1:
        return candidates[0]
    count = len(candidates)

    def rank(position: int) -> tuple[bool, bool, int, int]:
        server = candidates[position]
        full = server.slots is not None and server.in_flight >= server.slots
        return server.state not in _READY, full, server.in_flight, (position - turn) % count

    return candidates[min(range(count), key=rank)]
