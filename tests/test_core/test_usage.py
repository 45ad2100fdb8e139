"""Readers of usage and timings, the tally, and what the meter books of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.meter import PlainMeter, StreamMeter
from smolproxy.core.usage import Counts, Tally, Usage, read_timings, read_usage
from tests.test_core.streams import CHAT, DONE, EMBEDDINGS, TEXT, call, dump, event, recorded, run

NOTHING = Counts(None, None, None)


def usage(prompt: Any, completion: Any, cached: Any = None, **more: Any) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **details, **more}


def timings(prompt: int, predicted: int, cached: int | None = None) -> dict[str, Any]:
    cache = {} if cached is None else {"cache_n": cached}
    return {**cache, "prompt_n": prompt, "prompt_ms": 2.5, "predicted_n": predicted, "predicted_ms": 4}


def chunk(content: Any = "x", index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    delta = {"content": content} if isinstance(content, str) else content or {}
    return event({"choices": [{"finish_reason": finish, "index": index, "delta": delta}], **more})


def piece(text: str = "x", index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"text": text, "index": index, "logprobs": None, "finish_reason": finish}], **more})


def told(value: Any, **more: Any) -> bytes:
    return event({"choices": [], "usage": value, **more})


ROLE = chunk({"role": "assistant", "content": None})


def booked(*parts: bytes, endpoint: Any = CHAT, **fields: Any) -> tuple[Counts, str]:
    meter = StreamMeter(call(endpoint, **fields))
    run(meter, b"".join(parts))
    return meter.settle().counts()


# Readers


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        (usage(25, 3, 20), Counts(25, 20, 3)),
        (usage(25, 3), Counts(25, None, 3)),
        (usage(0, 0, 0), Counts(0, 0, 0)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Counts(5, None, 0)),
        ({"completion_tokens": 5, "total_tokens": 7}, Counts(2, None, 5)),
        ({"prompt_tokens": 5, "total_tokens": 4}, Counts(5, None, 0)),
        ({"prompt_tokens": 5}, Counts(5, None, None)),
        ({"completion_tokens": 0}, Counts(None, None, 0)),
        (usage(5, None), Counts(5, None, None)),
        (usage(None, None), None),
        (usage(-1, "3"), None),
        (usage(True, 2.0), None),
        (usage(2**63, 10**400), None),
        ({"total_tokens": 9}, None),
        ({**usage(1, 2), "prompt_tokens_details": None}, Counts(1, None, 2)),
        ({**usage(1, 2), "prompt_tokens_details": {"cached_tokens": None}}, Counts(1, None, 2)),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_usage_objects(value: Any, counts: Counts | None) -> None:
    assert read_usage(value) == counts


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        (timings(5, 3, 20), Counts(25, 20, 3)),
        (timings(5, 3), Counts(5, None, 3)),
        (timings(0, 0, 0), Counts(0, 0, 0)),
        ({"predicted_n": 3}, Counts(None, None, 3)),
        ({"prompt_n": 3, "predicted_n": -1}, Counts(3, None, None)),
        ({"cache_n": 3}, None),
        ({}, None),
        (None, None),
        ("x", None),
    ],
)
def test_timings_objects(value: Any, counts: Counts | None) -> None:
    assert read_timings(value) == counts


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.dictionaries(
    st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "cached_tokens",
                     "prompt_n", "cache_n", "predicted_n", "prompt_ms", "predicted_ms"]), inner) | st.lists(inner)),
    st.integers(), st.booleans())  # fmt: skip
def test_counts_fit_into_the_books(value: Any, index: int, alone: bool) -> None:
    tally = Tally(1, 2)
    tally.add_usage(value, tally.known(index), alone=alone)
    tally.add_timings(value, tally.known(index))
    for count in (*tally.counts()[0], tally.prompt_ms, tally.predicted_ms):
        assert count is None or 0 <= count < 2**62


def test_of_nothing_there_is_no_usage() -> None:
    assert Usage() == (0, 0, 0, "none", None, None)
    assert Tally().counts() == (NOTHING, "counted")
    assert (Tally().prompt_ms, Tally().predicted_ms) == (None, None)


# Where the numbers come from


def test_usage_beats_timings() -> None:
    assert booked(ROLE, chunk(), told(usage(25, 3, 20), timings=timings(1, 1, 1))) == (Counts(25, 20, 3), "usage")
    assert booked(ROLE, chunk(), told(usage(25, 3, 20), timings=timings(50, 50, 50))) == (Counts(25, 20, 3), "usage")


def test_timings_with_the_cached_part() -> None:
    assert booked(ROLE, chunk(timings=timings(5, 1, 20)), chunk(timings=timings(5, 2, 20))) == (
        Counts(25, 20, 2),
        "timings",
    )
    assert booked(chunk("", finish="stop", timings=timings(5, 3, 20)), DONE) == (Counts(25, 20, 3), "timings")


def test_timings_complete_what_the_usage_leaves_out() -> None:
    assert booked(chunk(timings=timings(5, 2, 20)), told({"prompt_tokens": 25})) == (Counts(25, 20, 2), "usage")
    assert booked(chunk(timings=timings(5, 2)), told({"completion_tokens": 4})) == (Counts(5, None, 4), "usage")


def test_neither() -> None:
    assert booked(ROLE, chunk(), chunk(""), chunk(), chunk({}, finish="stop"), DONE) == (
        Counts(None, None, 2),
        "counted",
    )
    assert booked(ROLE, DONE) == (NOTHING, "counted")
    assert booked(ROLE, chunk(), chunk(), told({"prompt_tokens": 3})) == (Counts(3, None, 2), "counted")


def test_usage_null() -> None:
    assert booked(chunk(usage=None), chunk(usage=None), told(None), DONE) == (Counts(None, None, 2), "counted")
    assert booked(chunk(usage=None), told(usage(4, 1)), told(None), DONE) == (Counts(4, None, 1), "usage")


def test_zero_is_a_number_that_was_told() -> None:
    assert booked(ROLE, told(usage(0, 0, 0)), DONE) == (Counts(0, 0, 0), "usage")
    assert booked(chunk(), told(usage(0, 0))) == (Counts(0, None, 0), "usage")


def test_usage_in_every_chunk() -> None:
    parts = [chunk(usage=usage(9, made)) for made in (1, 2, 3)]
    assert booked(ROLE, *parts) == (Counts(9, None, 3), "usage")
    assert booked(ROLE, *parts, chunk({}, finish="stop", usage=usage(9, 4)), DONE) == (Counts(9, None, 4), "usage")
    assert booked(ROLE, *parts, told(usage(9, 5)), DONE) == (Counts(9, None, 5), "usage")
    parts = [chunk(usage=usage(9, made), timings=timings(1, 1)) for made in (1, 2, 3)]
    assert booked(ROLE, *parts) == (Counts(9, None, 3), "usage")
    alone = [told(usage(9, made)) for made in (1, 2, 3)]
    assert booked(ROLE, *alone, DONE) == (Counts(9, None, 3), "usage")
    assert booked(told(usage(9, 0)), chunk(), chunk({}, finish="stop", usage=usage(9, 7))) == (
        Counts(9, None, 7),
        "usage",
    )


def test_usage_on_the_finish_chunk() -> None:
    assert booked(ROLE, chunk(), chunk({}, finish="stop", usage=usage(4, 2, 1)), DONE) == (Counts(4, 1, 2), "usage")
    assert booked(piece(), piece("", finish="stop", usage=usage(4, 2, 1)), endpoint=TEXT) == (Counts(4, 1, 2), "usage")


def test_usage_before_the_choices_and_in_other_order() -> None:
    first = b'data: {"usage" : {"completion_tokens":2, "prompt_tokens" : 4} , "choices" : [ ] }\n\n'
    assert booked(chunk(), first) == (Counts(4, None, 2), "usage")
    first = (
        b'data: {"timings": {"predicted_n" : 2,\t"prompt_n" : 4}, "choices":[{"text":"x","finish_reason":null}]}\n\n'
    )
    assert booked(chunk(), first, first) == (Counts(4, None, 2), "timings")
    assert booked(b'data: {"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n') == (Counts(1, None, 2), "usage")


def test_text_that_looks_like_numbers() -> None:
    text = '","usage":{"prompt_tokens":9,"completion_tokens":9},"timings":{"predicted_n":9}}\n\ndata: [DONE]'
    for more in ({}, {"timings": timings(3, 2)}):
        meter = StreamMeter(call())
        run(meter, ROLE + chunk(text, **more) + chunk(text, **more))
        assert (meter.done, meter.complete) == (False, False)
        assert meter.settle().counts() == (
            (Counts(3, None, 2), "timings") if more else (Counts(None, None, 2), "counted")
        )


def test_two_data_lines() -> None:
    split = b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n'
    assert booked(split) == (Counts(4, None, 2), "usage")
    both = chunk().rstrip() + b"\n" + chunk().rstrip() + b"\n" + told(usage(4, 2))
    assert booked(both) == (Counts(4, None, 2), "usage")
    meter = StreamMeter(call())
    assert run(meter, chunk().rstrip() + b"\n" + DONE) == chunk().rstrip() + b"\n" + DONE
    assert (meter.done, meter.started) == (True, True)


def test_times_are_the_last_ones() -> None:
    meter = StreamMeter(call())
    run(meter, chunk(timings=timings(3, 1)) + chunk(timings={**timings(3, 2), "predicted_ms": 7}))
    tally = meter.settle()
    assert (tally.prompt_ms, tally.predicted_ms) == (2.5, 7.0)
    assert meter.settle() is tally  # settling twice does no harm
    assert tally.counts() == (Counts(3, None, 2), "timings")


def test_the_last_timings_count_however_they_are_written() -> None:
    plain, other = (
        chunk(timings=timings(3, 2)),
        b'data: {"timings":{"predicted_n":3,"prompt_n":3},"choices":[{"delta":{}}]}\n\n',
    )
    assert booked(plain, plain, other)[0].completion == 3
    assert booked(other, plain)[0].completion == 2


# Several choices


def test_a_usage_chunk_for_each_choice() -> None:
    parts = [
        *(chunk("x", 0), chunk("x", 1), chunk("x", 1), chunk({}, 1, "stop"), told(usage(7, 2, 7))),
        *(chunk("x", 0), chunk("x", 0), chunk({}, 0, "stop"), told(usage(7, 3, 2)), DONE),
    ]
    assert booked(*parts, n=2) == (Counts(7, 2, 5), "usage")
    late = [chunk({}, 0, "stop"), chunk({}, 1, "stop"), told(usage(7, 3)), told(usage(7, 2)), DONE]
    assert booked(*late, n=2) == (Counts(7, None, 5), "usage")
    assert booked(late[0], *late, n=2) == (Counts(7, None, 5), "usage")  # an end told twice is one end


def test_one_usage_chunk_for_all_choices() -> None:
    parts = [chunk("x", 0), chunk("x", 1), chunk({}, 1, "stop"), chunk({}, 0, "stop"), told(usage(7, 5)), DONE]
    assert booked(*parts, n=2) == (Counts(7, None, 5), "usage")
    parts = [*parts[:-2], chunk({}, 0, "stop", usage=usage(7, 5)), DONE]
    assert booked(*parts, n=2) == (Counts(7, None, 5), "usage")
    ends = [piece("", 0, "stop"), piece("", 1, "stop", usage=usage(7, 5))]
    assert booked(*ends, endpoint=TEXT, prompt=["a", "b"]) == (Counts(7, None, 5), "usage")


def test_usage_in_every_chunk_of_several_choices() -> None:
    parts = [chunk("x", index, usage=usage(7, made)) for made in (1, 2, 3) for index in (0, 1)]
    assert booked(*parts, n=2) == (Counts(7, None, 6), "usage")
    ends = [chunk({}, 0, "stop", usage=usage(7, 4)), chunk({}, 1, "stop", usage=usage(7, 3))]
    assert booked(*parts, *ends, n=2) == (Counts(7, None, 7), "usage")
    assert booked(*parts, *ends, told(usage(7, 7)), DONE, n=2) == (Counts(7, None, 7), "usage")


def test_timings_of_each_choice() -> None:
    parts = [chunk("x", index, timings=timings(7 - 7 * index, made, 7 * index)) for made in (1, 2) for index in (0, 1)]
    assert booked(*parts, n=2) == (Counts(7, 0, 4), "timings")
    # what is still under way counts too where the usage tells only what has finished
    assert booked(*parts, chunk({}, 1, "stop"), told(usage(7, 3)), n=2) == (Counts(7, 0, 4), "usage")
    ends = [chunk({}, 1, "stop"), told(usage(7, 3), timings=timings(0, 3, 7)), chunk("x", 0, timings=timings(7, 5))]
    assert booked(*parts, *ends, n=2) == (Counts(7, 7, 8), "usage")


def test_several_prompts() -> None:
    fields = {"prompt": ["a", "b c"], "n": 2}
    parts = [piece("x", index, timings=timings(4 + index // 2, 1, 0)) for index in (0, 1, 2, 3)]
    ends = [piece("", index, "length", usage=usage(4 + index // 2, 10 + index, 0)) for index in (3, 0, 2, 1)]
    assert booked(*parts, endpoint=TEXT, **fields) == (Counts(9, 0, 4), "timings")
    assert booked(*parts, *ends, DONE, endpoint=TEXT, **fields) == (Counts(9, 0, 46), "usage")
    assert booked(*ends, DONE, endpoint=TEXT, **fields) == (Counts(9, 0, 46), "usage")
    assert booked(*ends[:-1], endpoint=TEXT, **fields) == (Counts(9, 0, 35), "usage")
    # of prompts that nothing was told of there is no knowing
    assert booked(ends[0], endpoint=TEXT, **fields) == (Counts(None, 0, 13), "usage")
    assert booked(*parts[:2], endpoint=TEXT, **fields) == (Counts(None, 0, 2), "timings")
    assert booked(*parts[:2], told(usage(9, 46)), endpoint=TEXT, **fields) == (Counts(9, 0, 46), "usage")


def test_choices_that_were_not_asked_for() -> None:
    for index in (7, -1, "1", None, 1.0, 10**30):
        part = event(
            {
                "choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}],
                "timings": timings(4, 2),
            }
        )
        meter = StreamMeter(call(n=2))
        run(meter, part * 3)
        assert meter.settle().counts() == (Counts(4, None, 2), "timings")
        assert meter.tally.finished == {0}
        assert not meter.complete
    assert booked(event({"choices": [None, "x", 3], "usage": usage(1, 2)})) == (Counts(1, None, 2), "usage")


def test_two_choices_in_one_chunk() -> None:
    choices = [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"} for index in (0, 1)]
    meter = StreamMeter(call(n=2))
    run(meter, event({"choices": choices}))
    assert meter.complete
    assert meter.settle().deltas == 2


# Real streams


@pytest.mark.parametrize("variant", ["asked", "usage", "unasked", "tpt"])
@pytest.mark.parametrize(
    ("name", "endpoint", "fields", "counts"),
    [
        ("chat", CHAT, {}, Counts(30, 0, 6)),
        ("chat_zero", CHAT, {}, Counts(30, 0, 1)),
        ("chat_logprobs", CHAT, {}, Counts(30, 0, 2)),
        ("chat_progress", CHAT, {}, Counts(30, 0, 6)),
        ("chat_n2", CHAT, {"n": 2}, Counts(30, 0, 6)),
        ("text", TEXT, {}, Counts(3, 0, 4)),
        ("text_n2", TEXT, {"n": 2}, Counts(3, 0, 6)),
        ("text_list", TEXT, {"prompt": ["a", "b"]}, Counts(7, 0, 8)),
        ("text_list_n2", TEXT, {"prompt": ["a", "b"], "n": 2}, Counts(7, 0, 8)),
    ],
)
def test_real_streams(name: str, endpoint: Any, fields: Any, counts: Counts, variant: str) -> None:
    meter = StreamMeter(call(endpoint, **fields))
    run(meter, recorded(f"{name}.{variant}"))
    told_usage = endpoint is TEXT or variant in ("asked", "usage")
    assert meter.settle().counts() == (counts, "usage" if told_usage else "timings")
    assert meter.complete
    assert meter.done
    assert not meter.error


@pytest.mark.parametrize("name", ["chat", "chat_n2", "text", "text_list_n2"])
def test_real_streams_cut_short_tell_what_was_made_until_then(name: str) -> None:
    fields = {"n": 2} if name.endswith("n2") else {}
    if "list" in name:
        fields["prompt"] = ["a", "b"]
    endpoint = TEXT if name.startswith("text") else CHAT
    made: dict[bytes, int] = {}
    index = b""
    meter = StreamMeter(call(endpoint, **fields))
    for part in recorded(f"{name}.asked").split(b"\n\n")[:-2]:
        meter.feed(part + b"\n\n")
        if b'"predicted_n":' in part:
            # usage chunks have no index: they follow their choice's end
            index = part.partition(b'"index":')[2][:1] or index
            made[index] = int(part.partition(b'"predicted_n":')[2].partition(b",")[0])
        if made:
            assert meter.settle().counts()[0].completion == sum(made.values())
    assert made


def test_while_the_prompt_is_processed_its_length_is_not_known() -> None:
    meter = StreamMeter(call())
    for part in recorded("chat_progress.asked").split(b"\n\n"):
        if b'"prompt_progress"' in part:
            meter.feed(part + b"\n\n")
            assert meter.settle().counts() == (NOTHING, "counted")
            assert not meter.started


# What else a stream tells


@pytest.mark.parametrize(
    "part",
    [
        chunk(),
        chunk({"reasoning_content": "hm"}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
        chunk({"role": "assistant", "content": "x"}),
        piece(),
    ],
)
def test_the_first_token(part: bytes) -> None:
    meter = StreamMeter(call())
    for silent in (
        ROLE,
        chunk({"role": "assistant", "content": ""}),
        chunk({}),
        chunk(""),
        piece(""),
        b":\n\n",
        b"data: null\n\n",
    ):
        meter.feed(silent)
        assert not meter.started
    meter.feed(chunk({"role": "assistant", "content": None}, timings=timings(3, 0)))
    assert not meter.started
    meter.feed(part)
    assert meter.started
    assert meter.settle().deltas == 1


@pytest.mark.parametrize(
    "part",
    [
        b'data: {"error":{"code":500,"message":"no"}}\n\n',
        b'error: {"code":500,"message":"no"}\n\n',
        b'data: { "error" : "no" }\n\n',
        b'event: error\ndata: {"message":"no"}\n\n',
        event({"error": {"message": "no"}, "choices": [{"delta": {}, "finish_reason": "error"}]}),
        b'data: {"error":{"message":"no"}}',
    ],
)
def test_errors_inside_a_stream(part: bytes) -> None:
    meter = StreamMeter(call())
    assert run(meter, chunk() + part) == chunk() + part
    assert meter.error


@pytest.mark.parametrize(
    "part",
    [
        chunk('"error":{"message":"no"}'),
        chunk('{"error":1}', timings=timings(1, 1)),
        event({"error": None, "choices": []}),
        event({"x": {"error": {"message": "no"}}}),
        b": error: no\n\n",
        b"data: error: no\n\n",
    ],
)
def test_what_is_no_error(part: bytes) -> None:
    meter = StreamMeter(call())
    run(meter, chunk() + part)
    assert not meter.error


def test_the_end() -> None:
    meter = StreamMeter(call(n=2))
    meter.feed(chunk({}, 0, "stop") + chunk({}, 0, "stop"))
    assert not meter.complete
    meter.feed(chunk({}, 1, ""))
    meter.feed(chunk({}, 1, None))
    assert not meter.complete
    meter.feed(chunk({}, 1, "tool_calls"))
    assert meter.complete
    assert not meter.done
    meter = StreamMeter(call(n=2))
    meter.feed(DONE)
    assert meter.complete


# Plain answers


def plain(answer: Any, endpoint: Any = CHAT, **fields: Any) -> tuple[Counts, str]:
    meter = PlainMeter(call(endpoint, stream=False, **fields))
    meter.feed(dump(answer))
    return meter.settle()[0].counts()


def test_plain_answers() -> None:
    message = {"choices": [{"message": {"content": "x"}}]}
    assert plain({**message, "usage": usage(25, 3, 20), "timings": timings(5, 3, 20)}) == (Counts(25, 20, 3), "usage")
    assert plain({**message, "timings": timings(5, 3, 20)}) == (Counts(25, 20, 3), "timings")
    assert plain({**message, "usage": None}) == (NOTHING, "counted")
    assert plain({**message, "usage": usage(2, 0)}) == (Counts(2, None, 0), "usage")
    vectors = {"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    assert plain(vectors, EMBEDDINGS, input=["a", "b"]) == (Counts(8, None, 0), "usage")
    assert plain({**message, "usage": usage(4, 8)}, n=2) == (Counts(4, None, 8), "usage")
