"""The meter of streams: the client's bytes. What it books is in test_usage.py."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core import sse
from smolproxy.core.call import Call
from smolproxy.core.meter import PlainMeter, StreamMeter
from tests.test_core.streams import CHAT, DONE, TEXT, call, dump, event, recorded, run, unasked

ONE = {
    "chat": (CHAT, {}),
    "chat_progress": (CHAT, {}),
    "chat_zero": (CHAT, {}),
    "chat_logprobs": (CHAT, {}),
    "text": (TEXT, {}),
}
MANY = {
    "chat_n2": (CHAT, {"n": 2}),
    "text_n2": (TEXT, {"n": 2}),
    "text_list": (TEXT, {"prompt": ["a", "b"]}),
    "text_list_n2": (TEXT, {"prompt": ["a", "b"], "n": 2}),
}
CASES = {**ONE, **MANY}
USAGE = {"stream_options": {"include_usage": True}}
TIMINGS = {"timings_per_token": True}
AWKWARD = [
    "a",
    "é",
    "\u0085",
    "\u2028",
    "\\",
    '"',
    "{",
    "}",
    ":",
    "\n",
    "data: [DONE]",
    '"usage":{',
    '"error":',
    "\ud7ff",
]
AWKWARD += ['"timings":{"predicted_n":7}', ',"timings":{}}', '"finish_reason":"stop"', '"choices":[]', "\U0001f600"]


def state(meter: StreamMeter) -> tuple[Any, ...]:
    tally = meter.settle()
    return tally.counts(), tally.prompt_ms, tally.predicted_ms, tally.deltas, meter.done, meter.error, meter.complete


def portions(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


# The law of laws: what is added to the request is taken out of the answer.


@pytest.mark.parametrize("name", CASES)
def test_what_was_added_is_taken_out_of_real_streams(name: str) -> None:
    endpoint, fields = CASES[name]
    asked = recorded(f"{name}.asked")
    assert run(StreamMeter(call(endpoint, **fields)), asked) == unasked(asked)
    assert run(StreamMeter(call(endpoint, **fields, **USAGE)), asked) == unasked(asked, usage=False)
    assert run(StreamMeter(call(endpoint, **fields, **TIMINGS)), asked) == unasked(asked, timings=False)
    assert run(StreamMeter(call(endpoint, **fields, **USAGE, **TIMINGS)), asked) == asked


def masked(stream: bytes) -> bytes:
    """A stream without what differs from one generation to the next."""
    stream = re.sub(rb'"(created|[a-z_]+_ms|[a-z]+_per_second)":[0-9.e-]+', rb'"\1":0', stream)
    return re.sub(rb'"id":"chatcmpl-\w+"', b'"id":"x"', stream)


def by_choice(stream: bytes) -> list[bytes]:
    """Events ordered by their choice: how the choices interleave is chance. Choices end with their usage chunk."""
    index = 0
    parts: dict[int, list[bytes]] = {}
    for part in stream.split(b"\n\n"):
        found = re.search(rb'"index":(\d)', part)
        index = int(found[1]) if found else index if b'"usage"' in part else -1
        parts.setdefault(index, []).append(part)
    return [part for index in sorted(parts) for part in parts[index]]


@pytest.mark.parametrize("name", CASES)
def test_the_client_sees_what_a_real_server_says_unasked(name: str) -> None:
    endpoint, fields = CASES[name]
    for more, variant in (({}, "unasked"), (USAGE, "usage"), (TIMINGS, "tpt")):
        out = masked(run(StreamMeter(call(endpoint, **fields, **more)), recorded(f"{name}.asked")))
        real = masked(recorded(f"{name}.{variant}"))
        if name == "chat_progress":  # how often progress is told is chance
            out, real = (re.sub(rb'data: [^\n]*"prompt_progress"[^\n]*\n\n', b"", stream) for stream in (out, real))
        assert by_choice(out) == by_choice(real) if name in MANY else out == real


def timings(n: int, cached: int = 3) -> dict[str, Any]:
    return {"cache_n": cached, "prompt_n": 4, "prompt_ms": 1.5, "predicted_n": n, "predicted_ms": 0.1 * n}


@st.composite
def generations(draw: st.DrawFn) -> tuple[Call, bytes, bytes]:
    """A call, what a server says to it asked by smolproxy, and what it would have said to the client."""
    chat = draw(st.booleans())
    n = draw(st.integers(1, 3))
    wants_usage, wants_timings = draw(st.booleans()), draw(st.booleans())
    text = st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=3).map("".join)
    left = [draw(st.lists(text, max_size=4)) for _ in range(n)]
    made = [0] * n
    asked, wanted = [], []
    head = {"created": 1, "id": draw(text), "model": "m"}

    def say(value: dict[str, Any], **added: Any) -> None:
        asked.append(event({**value, **added}))
        wanted.append(event({**value, **{k: v for k, v in added.items() if k == "timings" and wants_timings}}))

    while open_choices := [index for index in range(n) if made[index] <= len(left[index])]:
        comment = draw(st.sampled_from([b"", b"", b":\n\n", b": hello\n", b":\n"]))
        asked.append(comment)
        wanted.append(comment)
        index = draw(st.sampled_from(open_choices))
        if made[index] == 0 and chat:
            say(
                {
                    "choices": [
                        {"finish_reason": None, "index": index, "delta": {"role": "assistant", "content": None}}
                    ],
                    **head,
                }
            )
        made[index] += 1
        if made[index] <= len(left[index]):
            piece = left[index][made[index] - 1]
            if chat:
                delta = {draw(st.sampled_from(["content", "reasoning_content"])): piece}
                choice: dict[str, Any] = {"finish_reason": None, "index": index, "delta": delta}
            else:
                choice = {"text": piece, "index": index, "logprobs": None, "finish_reason": None}
            say({"choices": [choice], **head}, timings=timings(made[index]))
            continue
        last = timings(made[index] - 1)
        usage = {"completion_tokens": made[index] - 1, "prompt_tokens": 7, "total_tokens": made[index] + 6}
        if not chat:
            closing = {"choices": [{"text": "", "index": index, "logprobs": None, "finish_reason": "stop"}]}
            whole = event({**closing, **head, "usage": usage, "timings": last})
            asked.append(whole)
            wanted.append(whole)
            continue
        closing = {"choices": [{"finish_reason": "stop", "index": index, "delta": {}}], **head}
        told = event({"choices": [], **head, "usage": usage, "timings": last})
        between = draw(st.sampled_from([b"", b"", b":\n\n"]))
        asked += [event(closing), between, told]
        wanted += [event(closing), between, told] if wants_usage else [event({**closing, "timings": last}), between]
    if draw(st.booleans()):
        asked.append(DONE)
        wanted.append(DONE)
    fields = {**(USAGE if wants_usage else {}), **(TIMINGS if wants_timings else {}), "n": n}
    ends = draw(st.sampled_from([b"\n", b"\n", b"\r\n"]))
    return (
        call(CHAT if chat else TEXT, **fields),
        b"".join(asked).replace(b"\n", ends),
        b"".join(wanted).replace(b"\n", ends),
    )


@settings(deadline=None)
@given(generations(), st.lists(st.integers(0, 10_000), max_size=8))
def test_what_was_added_is_taken_out_of_any_stream(made: tuple[Call, bytes, bytes], cuts: list[int]) -> None:
    which, asked, wanted = made
    assert run(StreamMeter(which), asked) == wanted
    assert run(StreamMeter(which), *portions(asked, cuts)) == wanted


# Portions do not matter.

LINES = [
    b"data: [DONE]",
    b"data: " + dump({"choices": [{"index": 0, "delta": {"content": "x"}}], "timings": timings(2)}),
    b"data: "
    + dump({"choices": [{"finish_reason": None, "index": 1, "delta": {"content": "x"}}], "timings": timings(3)}),
    b"data: " + dump({"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]}),
    b"data: " + dump({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}, "timings": timings(3)}),
    b'data:{ "timings" : {"predicted_n":1} , "choices":[{"text":"y","finish_reason":null}]}',
    b'data: {"error":{"message":"no"}}',
    b"error: {}",
    b"data: null",
    b'data: {"choices"',
    b": a comment",
    b":",
    b"",
    b"",
    b"event: x",
    b"\xe2\x80\xa8 \xc2\x85 \xff",
]


@st.composite
def any_streams(draw: st.DrawFn) -> bytes:
    lines = st.sampled_from(LINES) | st.binary(max_size=12)
    end = st.sampled_from([b"\n", b"\n", b"\n\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\r\r", b""])
    return b"".join(draw(st.lists(st.tuples(lines, end).map(b"".join), max_size=14)))


@settings(deadline=None)
@given(any_streams(), st.lists(st.integers(0, 10_000), max_size=8), st.sampled_from([{}, {"n": 2}, USAGE, TIMINGS]))
def test_portions_do_not_matter(stream: bytes, cuts: list[int], fields: dict[str, Any]) -> None:
    at_once, split, bytewise = (StreamMeter(call(**fields)) for _ in range(3))
    out = run(at_once, stream)
    assert run(split, *portions(stream, cuts)) == out
    assert run(bytewise, *(stream[i : i + 1] for i in range(len(stream)))) == out
    assert state(at_once) == state(split) == state(bytewise)


@settings(deadline=None)
@given(any_streams(), st.lists(st.integers(0, 10_000), max_size=8))
def test_nothing_is_changed_for_a_client_that_asked_for_all(stream: bytes, cuts: list[int]) -> None:
    for meter in (StreamMeter(call(**USAGE, **TIMINGS)), StreamMeter(call(CHAT, stream=False))):
        assert run(meter, *portions(stream, cuts)) == stream


@settings(deadline=None)
@given(any_streams().filter(lambda stream: b"timings" not in stream and b"usage" not in stream))
def test_a_stream_in_which_nothing_was_added_passes(stream: bytes) -> None:
    assert run(StreamMeter(call()), *(stream[i : i + 1] for i in range(len(stream)))) == stream
    assert run(StreamMeter(call()), stream) == stream


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"<html>no stream at all</html>",
        bytes(range(256)) * 3,
        b"\xef\xbb\xbfdata: {}\n\n",
        b'data: {"choices":[{"delta":{"content":"\xc2\x85\xe2\x80\xa8\xe2\x80\xa9"}}]}\n\n',
        b'data: {"choices":[{"delta":\ndata: {"content":"two lines"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"1"}}]}\ndata: {"choices":[{"delta":{"content":"2"}}]}\n\n',
        b'id: 7\nevent: message\nretry: 10\ndata: {"choices":[{"delta":{"content":"x"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"unfinished"}}]}',
        b'data: {"choices":[{"delta":{"content":"unfinished"}}]}\n',
        b'data: {"choices":[{"delta":{"cont',
        b": only\n:\n:comments\n\n",
        b"\n\n\n",
        b"data: [DONE]",
        b"data: [DONE]\n\nand more\n\ndata: x",
        b": c\ndata: [DONE]\n\n",
        b'data: {"choices":[{"delta":{"content":"t"},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"usage":{"prompt_tokens":1}}\n\n',
        'data: {"choices":[{"delta":{"content":"x"}}],"timings":{"a":1}}\n\n'.encode("utf-16"),
        b"data: " + b"[" * 100_000 + b"\n\n",
        b'data: {"choices":[{"delta":{"content":"x"}}],"n":' + b"9" * 5000 + b"}\n\n",
    ],
)
def test_odd_streams_pass_byte_for_byte(stream: bytes) -> None:
    for size in (1, 2, 3, 7, len(stream) or 1):
        meter = StreamMeter(call())
        assert run(meter, *(stream[i : i + size] for i in range(0, len(stream), size))) == stream


@pytest.mark.parametrize(
    ("chunk", "wanted"),
    [
        ('{"timings":{"predicted_n":1},"choices":[{"text":"x"}]}', '{"choices":[{"text":"x"}]}'),
        ('{ "choices" : [ {"text":"x"} ] , "timings" : { "predicted_n" : 1 } }', '{ "choices" : [ {"text":"x"} ] }'),
        ('{"choices":[{"text":"x"}],"timings":{"a":{"b":"}"}},"z":1}', '{"choices":[{"text":"x"}],"z":1}'),
        ('{"choices":[{"text":"x"}],"timings":{"a":{"b":"}"}}}', '{"choices":[{"text":"x"}]}'),
        ('{"choices":[{"finish_reason":null}],"timings":{"a":{"b":1}}}', '{"choices":[{"finish_reason":null}]}'),
        (
            '{"choices":[{"finish_reason":null}],"timings":{"a":1},"z":{"y":1}}',
            '{"choices":[{"finish_reason":null}],"z":{"y":1}}',
        ),
        ('{"choices":[{"text":"x","finish_reason":"stop"}],"timings":{"a":1}}', None),
        ('{"choices":[{"text":"x","timings":{"a":1}}],"z":{"timings":{}}}', None),
        ('{"choices":[{"text":"\\"timings\\":{\\"predicted_n\\":9}"}]}', None),
        ('{"choices":[{"text":",\\"timings\\":{}}"}]}', None),
        ('{"choices":[{"text":"x"}],"timings":null}', None),
        ('{"choices":[{"text":"x"}],"tim\\u0069ngs":{"predicted_n":1}}', '{"choices":[{"text":"x"}]}'),
    ],
)
def test_timings_are_taken_out_wherever_they_stand(chunk: str, wanted: str | None) -> None:
    asked = f"data: {chunk}\n\n".encode()
    out = asked if wanted is None else f"data: {wanted}\n\n".encode()
    meter = StreamMeter(call())
    assert run(meter, asked, asked) == out * 2
    meter = StreamMeter(call())
    plain = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "x"}}]})
    assert run(meter, plain, asked) == plain + out


def test_only_what_was_added_is_taken_out() -> None:
    content = event(
        {"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "x"}}], "timings": timings(1)}
    )
    told = event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    assert run(StreamMeter(call(**TIMINGS)), content, content, told) == content * 2
    bare = content.replace(b"," + dump({"timings": timings(1)})[1:-1], b"")
    assert run(StreamMeter(call(**USAGE)), content, content, told) == bare * 2 + told


# Nothing waits longer than it has to.

FINISH = event({"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}]})
TOLD = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}, "timings": timings(3)})
CONTENT = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "x"}}]})


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([CONTENT, b":\n", b":\n\n", b": c\r\n", b"event: a\ndata: b\n\n", b"\r\n"]), max_size=12)
)
def test_events_and_comments_do_not_wait(parts: list[bytes]) -> None:
    meter = StreamMeter(call())
    for part in parts:
        assert meter.feed(part) == part
    bytewise = StreamMeter(call())
    for part in parts:
        out = b"".join(bytewise.feed(part[i : i + 1]) for i in range(len(part)))
        assert out == part
    assert not meter.broken_event


def test_an_event_goes_out_with_its_last_byte_whatever_follows_it() -> None:
    meter = StreamMeter(call())
    assert meter.feed(CONTENT + CONTENT[:-1]) == CONTENT
    assert meter.feed(CONTENT[-1:] + b":") == CONTENT + b":"
    assert meter.broken_event  # a comment has begun
    assert meter.feed(b" hi\n") == b" hi\n"
    assert not meter.broken_event


def test_no_event_is_taken_for_complete_before_its_end() -> None:
    meter = StreamMeter(call())
    assert meter.feed(CONTENT[:-1] + b"x") == b""
    assert meter.settle().deltas == 0
    assert meter.feed(b"\n\n") == CONTENT[:-1] + b"x\n\n"
    assert meter.feed(b"data: 1\n") == b""
    assert meter.feed(CONTENT) == b"data: 1\n" + CONTENT
    assert meter.feed(b": within a comment ") != b""
    assert meter.feed(DONE) == DONE
    assert not meter.done


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_end_in_three_ways(end: bytes) -> None:
    stream = b": c" + end + (b"data: 1" + end + end) * 2 + b":" + end + b"data: [DONE]" + end + end
    for size in (1, 5, len(stream)):
        meter = StreamMeter(call())
        assert run(meter, *(stream[i : i + size] for i in range(0, len(stream), size))) == stream
        assert meter.done
    meter = StreamMeter(call())
    assert run(meter, b"data: 1\r\rdata: [DONE]\n\n") == b"data: 1\r\rdata: [DONE]\n\n"
    assert meter.done


def test_the_finish_chunk_waits_for_the_usage_chunk() -> None:
    meter = StreamMeter(call())
    assert meter.feed(FINISH) == b""
    assert meter.held
    assert meter.feed(b":\n\n") == b""  # must not overtake
    wanted = FINISH[:-3] + b"," + dump({"timings": timings(3)})[1:-1] + FINISH[-3:]
    assert meter.feed(TOLD) == wanted + b":\n\n"
    assert not meter.held
    assert meter.feed(DONE) == b""
    assert (meter.done, meter.tail) == (True, DONE)
    assert meter.feed(b"more") == b"more"


def test_what_waits_can_be_released() -> None:
    meter = StreamMeter(call())
    meter.feed(FINISH + b": c\n")
    assert meter.release() == FINISH + b": c\n"
    assert meter.release() == b""
    assert meter.feed(TOLD) == b""
    assert meter.settle().counts() == ((5, 3, 3), "usage")


@pytest.mark.parametrize("after", [CONTENT, b"data: x\n\n", event({"choices": [], "usage": None}), event([])])
def test_another_event_lets_the_finish_chunk_go(after: bytes) -> None:
    meter = StreamMeter(call())
    assert meter.feed(FINISH) == b""
    assert meter.feed(after) == FINISH + after
    assert meter.feed(FINISH) == b""
    assert meter.feed(DONE) == FINISH
    assert meter.close() == b""


def test_text_after_the_finish_chunk_does_not_overtake_it() -> None:
    text = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": "x"}}], "timings": timings(1)})
    meter = StreamMeter(call())
    assert meter.feed(text) == CONTENT
    assert meter.feed(FINISH) == b""
    assert meter.feed(text) == FINISH + CONTENT


def test_the_finish_chunk_does_not_wait_without_need() -> None:
    for fields in (USAGE, {**USAGE, **TIMINGS}):
        assert StreamMeter(call(**fields)).feed(FINISH) == FINISH
    complete = event({"choices": [{"finish_reason": "stop", "index": 0, "text": ""}], "timings": timings(3)})
    assert StreamMeter(call()).feed(complete) == complete
    complete = event({"choices": [{"finish_reason": "stop", "index": 0, "text": ""}], "usage": {"prompt_tokens": 1}})
    assert StreamMeter(call()).feed(complete) == complete


def test_comments_without_end_do_not_wait_for_ever_behind_the_finish_chunk() -> None:
    meter = StreamMeter(call())
    out = meter.feed(FINISH)
    for _ in range(3000):
        out += meter.feed(b": waiting\n")
    assert out.startswith(FINISH)
    assert len(out) > 10_000


# Large events


@pytest.mark.parametrize("size", [1000, 65536, 10**7])
@pytest.mark.parametrize("length", [sse.MAX_EVENT - 200, sse.MAX_EVENT - 40, sse.MAX_EVENT, 2 * 1024 * 1024])
def test_large_lines(size: int, length: int) -> None:
    choice = {"finish_reason": None, "index": 0, "delta": {"content": "é" * (length // 2)}}
    asked = event({"choices": [choice], "timings": timings(4)}) + FINISH + TOLD + DONE
    meter = StreamMeter(call())
    chunks = [asked[i : i + size] for i in range(0, len(asked), size)]
    assert run(meter, *chunks) == unasked(asked)
    assert state(meter)[0] == ((5, 3, 3), "usage")
    assert meter.settle().deltas == 1
    assert meter.started


@settings(deadline=None)
@given(st.lists(st.integers(0, 600_000), max_size=6), st.integers(-60, 60), st.booleans())
def test_portions_of_large_events_do_not_matter(cuts: list[int], more: int, finished: bool) -> None:
    choice = {"finish_reason": "length" if finished else None, "index": 1, "text": "x" * (sse.MAX_EVENT - 150 + more)}
    large = event({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}, "timings": timings(2)})
    stream = b":" + b"c" * (sse.MAX_EVENT + more) + b"\n" + large + CONTENT + large[:-1]
    at_once, split = StreamMeter(call(TEXT, n=2)), StreamMeter(call(TEXT, n=2))
    assert run(at_once, stream) == run(split, *portions(stream, cuts))
    assert state(at_once) == state(split)


@pytest.mark.parametrize("size", [10**7, 1000])
def test_what_large_events_tell(size: int) -> None:
    """The same, whether they come whole or in parts: what stands at their beginning and at their end."""
    text, pad = "x" * sse.MAX_EVENT, "p" * sse.EDGE
    told = {"prompt_tokens": 1, "completion_tokens": 2}
    for value, counts, complete in (
        ({"choices": [{"finish_reason": "stop", "delta": {"content": text}}], "timings": timings(4)}, (7, 3, 4), True),
        ({"choices": [{"text": text, "finish_reason": "stop"}], "timings": timings(4)}, (7, 3, 4), True),
        ({"choices": [{"text": text}], "usage": told}, (1, None, 2), False),
        ({"usage": told, "choices": [{"text": text}]}, (1, None, 2), False),
        ({"choices": [{"text": text}], "usage": told, "pad": pad + text}, (None, None, 1), False),
        ({"pad": text}, (None, None, None), False),
    ):
        meter = StreamMeter(call())
        data = event(value)
        assert run(meter, *(data[i : i + size] for i in range(0, len(data), size))) == data
        assert (meter.settle().counts()[0], meter.complete) == (counts, complete)


@pytest.mark.parametrize("start", [b'data: {"choices":[{"text":"', b":", b"garbage", b""])
def test_a_line_without_end_passes_with_little_memory(start: bytes) -> None:
    meter = StreamMeter(call())
    chunk = b"x" * (1024 * 1024)
    passed = len(meter.feed(start))
    tracemalloc.start()
    try:
        for _ in range(256):
            passed += len(meter.feed(chunk))
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert passed >= 256 * len(chunk) - sse.EDGE
    assert meter.broken_event
    assert passed + len(meter.close()) == len(start) + 256 * len(chunk)


def test_a_large_event_lets_the_finish_chunk_go_first() -> None:
    meter = StreamMeter(call())
    meter.feed(FINISH)
    begun = b"data: " + b"x" * sse.MAX_EVENT
    assert (FINISH + begun).startswith(meter.feed(begun))


# Plain answers


@settings(deadline=None)
@given(st.lists(st.integers(0, 3_000_000), max_size=5), st.sampled_from([10, 60_000, 140_000, 1_100_000, 2_000_000]))
def test_plain_answers_are_read_whatever_the_portions(cuts: list[int], size: int) -> None:
    usage = {"prompt_tokens": 25, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 20}}
    for answer in (
        {"choices": [{"message": {"content": "x" * size}}], "usage": usage, "timings": timings(3)},
        {"object": "list", "usage": usage, "timings": timings(3), "data": ["x" * size]},
    ):
        body = dump(answer)
        meter = PlainMeter(call(stream=False))
        for portion in portions(body, cuts):
            meter.feed(portion)
        tally, read = meter.settle()
        assert tally.counts() == ((25, 20, 3), "usage")
        assert (tally.prompt_ms, tally.predicted_ms) == (1.5, pytest.approx(0.3))
        assert read == (answer if len(body) <= 1024 * 1024 else None)
        assert meter.size == len(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"no json", b"\xff", b"[" * 100_000, b'{"usage":[1]}'])
def test_plain_answers_that_tell_nothing(body: bytes) -> None:
    meter = PlainMeter(call(stream=False))
    meter.feed(body)
    assert meter.settle()[0].counts() == ((None, None, None), "counted")


def test_a_plain_answer_that_python_cannot_parse_is_searched() -> None:
    meter = PlainMeter(call(stream=False))
    meter.feed(b'{"x":' + b"9" * 5000 + b',"usage":{"prompt_tokens":1,"completion_tokens":2}}')
    tally, answer = meter.settle()
    assert (tally.counts(), answer) == (((1, None, 2), "usage"), None)


def test_usage_across_the_edge_of_what_is_kept_first() -> None:
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":2}'
    meter = PlainMeter(call(stream=False))
    meter.feed(b'{"x":' + b"9" * (64 * 1024 - 30) + b"," + usage + b"}")
    assert meter.settle()[0].counts() == ((1, None, 2), "usage")


def test_text_in_a_long_plain_answer_is_no_usage() -> None:
    text = json.dumps({"usage": {"prompt_tokens": 99, "completion_tokens": 99}})
    body = dump(
        {
            "choices": [{"text": "x" * 2_000_000 + text}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2},
            "z": text,
        }
    )
    meter = PlainMeter(call(stream=False))
    meter.feed(body)
    assert meter.settle()[0].counts() == ((1, None, 2), "usage")


def test_a_usage_deep_in_a_plain_answer_is_not_the_answers() -> None:
    inner = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    meter = PlainMeter(call(stream=False))
    meter.feed(dump({"choices": [{"message": {"content": "x", "extra": inner}}], "timings": timings(3)}))
    assert meter.settle()[0].counts()[1] == "timings"
