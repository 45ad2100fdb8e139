from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core.caps import FIELDS, cap_fields

bodies = st.dictionaries(
    st.sampled_from(FIELDS),
    st.one_of(
        st.none(), st.integers(-3, 250), st.integers(), st.booleans(), st.floats(), st.text(), st.lists(st.integers())
    ),
)


def obeyed(body: dict[str, Any], known: tuple[str, ...]) -> Any:
    """What llama-server would generate at most: it obeys the last of these fields that is there and not null."""
    return next((body[name] for name in reversed(FIELDS) if name in known and body.get(name) is not None), None)


@pytest.mark.parametrize(
    ("body", "put"),
    [
        ({}, {"max_tokens": 100}),
        ({"messages": [], "stream": True}, {"max_tokens": 100}),
        ({"max_tokens": 99}, {}),
        ({"max_tokens": 100}, {}),
        ({"max_tokens": 0}, {}),
        ({"max_tokens": 101}, {"max_tokens": 100}),
        ({"max_tokens": -1}, {"max_tokens": 100}),
        ({"max_tokens": None}, {"max_tokens": 100}),
        ({"max_tokens": 50.0}, {"max_tokens": 100}),
        ({"max_tokens": "50"}, {"max_tokens": 100}),
        ({"max_tokens": True}, {"max_tokens": 100}),
        ({"max_tokens": 2**80}, {"max_tokens": 100}),
        ({"n_predict": -1}, {"n_predict": 100, "max_tokens": 100}),
        ({"n_predict": 10**9, "max_tokens": 5}, {"n_predict": 100}),
        ({"n_predict": 5, "max_tokens": 10**9}, {"max_tokens": 100}),
        ({"max_completion_tokens": 10**9}, {"max_completion_tokens": 100, "max_tokens": 100}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_output_tokens": 700}, {"max_output_tokens": 100, "max_tokens": 100}),
        # a number in place of null would be obeyed before the 5
        ({"n_predict": None, "max_tokens": 5}, {"n_predict": 5}),
        ({"n_predict": None, "max_completion_tokens": None, "max_tokens": None}, dict.fromkeys(FIELDS[1:], 100)),
    ],
)
def test_what_is_put(body: dict[str, Any], put: dict[str, int]) -> None:
    before = dict(body)
    assert cap_fields(100, body) == put
    assert body == before


def test_another_field_of_the_endpoint() -> None:
    assert cap_fields(100, {}, field="max_output_tokens") == {"max_output_tokens": 100}
    assert cap_fields(100, {"max_tokens": 5}, field="max_output_tokens") == {"max_output_tokens": 5}
    assert cap_fields(100, {"max_output_tokens": 5}, field="max_output_tokens") == {}


def test_a_cap_of_0() -> None:
    assert cap_fields(0, {}) == {"max_tokens": 0}
    assert cap_fields(0, {"n_predict": 1, "max_tokens": 0}) == {"n_predict": 0}


@given(st.integers(0, 200), bodies, st.sets(st.sampled_from(FIELDS)))
def test_no_server_generates_more(cap: int, body: dict[str, Any], known: set[str]) -> None:
    capped = {**body, **cap_fields(cap, body)}
    limit = obeyed(capped, tuple(known | {"max_tokens"}))
    assert type(limit) is int
    assert 0 <= limit <= cap


@given(st.integers(0, 200), bodies)
def test_what_is_within_the_cap_is_obeyed_as_asked(cap: int, body: dict[str, Any]) -> None:
    asked = obeyed(body, FIELDS)
    if type(asked) is int and 0 <= asked <= cap:
        assert obeyed({**body, **cap_fields(cap, body)}, FIELDS) == asked


@given(st.integers(0, 200), bodies)
def test_capping_twice_changes_nothing(cap: int, body: dict[str, Any]) -> None:
    assert cap_fields(cap, {**body, **cap_fields(cap, body)}) == {}
