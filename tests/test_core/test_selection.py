from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.selection import choose

STATES = ["up", "busy", "unknown", "loading", "down", "wrong_key", "disabled"]


@dataclass(eq=False)
class Box:
    state: str = "up"
    slots: int | None = 4
    in_flight: int = 0


boxes = st.builds(Box, st.sampled_from(STATES), st.none() | st.integers(0, 4), st.integers(0, 8))


def full(box: Box) -> bool:
    return box.slots is not None and box.in_flight >= box.slots


def test_none_is_left() -> None:
    tried = Box()
    assert choose([], 0) is None
    assert choose([Box("disabled")], 0) is None
    assert choose([tried, Box("disabled")], 0, [tried]) is None


@pytest.mark.parametrize("state", ["loading", "down", "wrong_key"])
def test_one_that_is_not_up_is_the_last_resort(state: str) -> None:
    bad, good = Box(state), Box("busy", slots=1, in_flight=50)
    assert choose([bad, good], 0) is good
    assert choose([bad, good], 0, [good]) is bad
    assert choose([bad], 3) is bad


def test_a_free_slot_before_fewer_requests() -> None:
    small, large = Box(slots=1, in_flight=1), Box(slots=8, in_flight=5)
    assert choose([small, large], 0) is large
    unknown = Box(slots=None, in_flight=9)
    assert choose([small, unknown], 0) is unknown


def test_the_fewest_requests() -> None:
    first, second, third = Box(in_flight=2), Box(in_flight=1), Box(in_flight=3)
    assert all(choose([first, second, third], turn) is second for turn in range(6))


def test_equals_take_turns() -> None:
    servers = [Box(), Box("busy"), Box("unknown")]
    assert [choose(servers, turn) for turn in range(6)] == servers * 2
    spare = [Box(), *servers]
    turns = Counter(id(choose(spare, turn, [spare[0]])) for turn in range(30))
    assert turns == {id(server): 10 for server in servers}


@settings(deadline=None)
@given(st.lists(boxes, max_size=5), st.integers(0, 1000), st.data())
def test_nothing_better_is_passed_over(servers: list[Box], turn: int, data: st.DataObject) -> None:
    tried = [server for server in servers if data.draw(st.booleans())]
    rest = [server for server in servers if server not in tried and server.state != "disabled"]
    chosen = choose(servers, turn, tried)
    if not rest:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen in rest
    ready = ("up", "busy", "unknown")
    best = min((server.state not in ready, full(server), server.in_flight) for server in rest)
    assert (chosen.state not in ready, full(chosen), chosen.in_flight) == best
