"""Bodies of requests: what is read of them, and what is changed in their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy.core.call import Call, decode, outgoing, parse
from smolproxy.core.jsontext import members, read, read_at, splice, value_of
from smolproxy.errors import ApiError
from tests.test_core.streams import CHAT, EMBEDDINGS, TEXT

ADDED = {"timings_per_token": True, "stream_options": {"include_usage": True}}


def out(body: str | bytes, model: str = "real", endpoint: Any = CHAT, **more: Any) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    call, fields = parse(endpoint, data)
    return outgoing(call, model, fields, **more)


def refused(body: bytes | str, endpoint: Any = CHAT) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, body if isinstance(body, bytes) else body.encode())
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value


def read_or_refuse(endpoint: Any, body: bytes) -> bytes | ApiError:
    """What goes out, or a clear refusal; any other exception is a fault."""
    try:
        call, fields = parse(endpoint, body)
    except ApiError as error:
        return error
    return outgoing(call, "real", fields)


# Any JSON object, written in any way

KEYS = [
    "model",
    "stream",
    "stream_options",
    "timings_per_token",
    "include_usage",
    "n",
    "x",
    "",
    '"model"',
    "é{",
    "m:,",
    "\ud800",
]


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """A JSON value, written with any space and escapes."""
    space = st.sampled_from(["", "", " ", "\n", "\t \r"])
    if isinstance(value, Pairs):
        pairs = [
            draw(space) + draw(written(key)) + draw(space) + ":" + draw(space) + draw(written(item)) + draw(space)
            for key, item in value
        ]
        return "{" + (",".join(pairs) or draw(space)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(draw(space) + draw(written(item)) + draw(space) for item in value) + "]"
    if isinstance(value, str):
        plain = json.dumps(
            value, ensure_ascii=any(0xD800 <= ord(char) < 0xE000 for char in value) or draw(st.booleans())
        )
        if value and draw(st.booleans()) and value.isascii():
            plain = '"' + "".join(f"\\u{ord(char):04x}" for char in value) + '"'
        return plain.replace("/", draw(st.sampled_from(["/", "\\/"])))
    return (
        draw(st.sampled_from([json.dumps(value), "-0.0e+1", "1E400", "9" * 4500]))
        if type(value) is int
        else json.dumps(value)
    )


class Pairs(list):  # type: ignore[type-arg]
    """The members of an object, a name as often as wanted."""


text = st.text(st.sampled_from('ab"\\{}[]:,/é\u2028\x00\n😀\ud800'), max_size=6)
scalars = st.none() | st.booleans() | st.integers(-5, 5) | text | st.just("model")
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(st.sampled_from(KEYS) | text, inner), max_size=3).map(Pairs)
    ),
    max_leaves=6,
)
named = st.sampled_from(["fast", "real", "", "qwen/3:8b é", "x" * 300, "a/b", "fa\\st"])
pairs = st.lists(
    st.tuples(st.just("model"), named)
    | st.tuples(st.just("stream"), st.booleans())
    | st.tuples(st.just("stream_options"), values)
    | st.tuples(st.sampled_from(KEYS[2:]) | text, values),
    max_size=6,
).map(Pairs)
bodies = pairs.flatmap(written)


def with_all(body: bytes) -> Any:
    """A body's members, all of them; numbers as they are written."""
    return json.loads(
        body,
        object_pairs_hook=Pairs,
        parse_int=lambda digits: ("int", digits),
        parse_float=lambda text: ("float", text),
    )


@settings(deadline=None)
@given(bodies, st.sampled_from(["real", "fast", "a/b", "é\n"]), st.sampled_from(["", " ", "\n\t"]), st.data())
def test_only_what_has_to_change_changes(body: str, model: str, space: str, data: st.DataObject) -> None:
    raw = (space + body + space).encode()
    drop = data.draw(st.sampled_from([(), ("x",), ("x", "stream_options"), ("nowhere",)]))
    put = data.draw(st.sampled_from([{}, {"n": 7}, {"max_tokens": 5, "n": 1}]))
    call, fields = parse(CHAT, raw)
    result = outgoing(call, model, fields, put=put, drop=drop)

    want = dict(put)
    if call.model != model or sum(key == "model" for key, _ in with_all(raw)) > 1:
        want["model"] = model
    if (
        call.stream
        and fields.get("timings_per_token") in (None, False)
        and type(fields.get("timings_per_token")) is not int
    ):
        want["timings_per_token"] = True
    before = [(key, value) for key, value in with_all(raw) if key not in drop or key in want]
    options = fields.get("stream_options")
    included = options.get("include_usage") if type(options) is dict else options
    left_open = included is None or (included is False and type(options) is dict)
    if call.stream and left_open and "stream_options" not in drop:
        asked = Pairs(
            next(value for key, value in reversed(before) if key == "stream_options") if options is not None else []
        )
        had = [(key, True if key == "include_usage" else value) for key, value in asked]
        want["stream_options"] = Pairs(had if "include_usage" in dict(asked) else [("include_usage", True), *had])
    if "stream_options" in drop:
        return
    numbers = {name: ("int", str(value)) if type(value) is int else value for name, value in want.items()}
    after = [(key, numbers.get(key, value)) for key, value in before if key not in drop or key in want]
    front = [(key, numbers[key]) for key in numbers if key not in {key for key, _ in after}]
    result_pairs = with_all(result)
    assert sorted(map(repr, result_pairs[: len(front)])) == sorted(map(repr, front))
    assert result_pairs[len(front) :] == after
    assert result.startswith(space.encode())
    assert result.endswith(space.encode())
    if not want and not set(drop) & set(fields):
        assert result is raw
    assert decode(result)  # an object still


@settings(deadline=None)
@given(bodies)
def test_members_are_found_where_they_are(body: str) -> None:
    raw = body.encode()
    found = [(name, with_all(raw[start:stop])) for name, _, start, stop, _ in members(raw)]
    assert found == with_all(raw)
    for name, first, start, stop, after in members(raw):
        assert raw[first - 1 : first] in (b"{", b",")
        assert raw[after : after + 1] in (b"}", b",")
        assert raw[stop:after].strip() == b""
        assert raw[start:stop].strip() == raw[start:stop] != b""
        assert value_of(raw, name) is not None
    assert splice(raw, {}) == raw


# What is sent


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ('{"model":"fast"}', '{"model":"real"}'),
        (' { "a" : [1, 2] , "model" : "fast" , "b":{} }\n', ' { "a" : [1, 2] , "model" : "real" , "b":{} }\n'),
        ('{"model":"fast","x":1,"model":"fast"}', '{"model":"real","x":1,"model":"real"}'),
        ('{"model":"other","x":1,"model":"real"}', '{"model":"real","x":1,"model":"real"}'),
        ('{"mod\\u0065l":"other","model":"real"}', '{"mod\\u0065l":"real","model":"real"}'),
        ('{"model":"other","mod\\u0065l":"real"}', '{"model":"real","mod\\u0065l":"real"}'),
        ('{"\\u006d\\u006F\\u0064\\u0065\\u006c":"fast"}', '{"\\u006d\\u006F\\u0064\\u0065\\u006c":"real"}'),
        ('{"model":null}', '{"model":"real"}'),
        ('{"model":""}', '{"model":"real"}'),
        ("{}", '{"model":"real"}'),
        ("{ }", '{"model":"real" }'),
        ('{"x":"model"}', '{"model":"real","x":"model"}'),
        ('{"x":{"model":"fast"},"model":"fast"}', '{"x":{"model":"fast"},"model":"real"}'),
        ('{"x":"\\"model\\":\\"fast\\"}","model":"fast"}', '{"x":"\\"model\\":\\"fast\\"}","model":"real"}'),
        ('{"x":"\\\\","model":"fast"}', '{"x":"\\\\","model":"real"}'),
        ('{"model":"fast","x":"\\\\\\""}', '{"model":"real","x":"\\\\\\""}'),
        ('{"x":[[{"a":"]}"}],"["],"model":"fast"}', '{"x":[[{"a":"]}"}],"["],"model":"real"}'),
    ],
)
def test_the_alias_is_replaced_where_it_stands(body: str, result: str) -> None:
    assert out(body) == result.encode()


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"real"}',
        ' {"model" : "r\\u0065al", "x":1e5}\n',
        '{"tools":[{"properties":{"model":{"type":"string"}}}],"model":"re\\u0061l"}',
        '{"messages":[{"content":"caf\\u00e9"}],"model":"r\\u0065al"}',
        '{"model":"real","stream":false,"x":"\\ud800"}',
        '{"model":"real","stream":"true"}',
        '{"model":"real","stream":null}',
    ],
)
def test_a_body_that_need_not_change_is_the_same(body: str) -> None:
    raw = body.encode()
    call, fields = parse(CHAT, raw)
    assert outgoing(call, "real", fields) is raw
    assert not call.added


BOTH = '"timings_per_token":true,"stream_options":{"include_usage":true}'


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("{%s}", "{" + BOTH + ",%s}"),
        ('{"stream":false,%s}', "{" + BOTH + ',"stream":false,%s}'),
        (
            '{"stream_options":null,%s,"timings_per_token":null}',
            '{"stream_options":{"include_usage":true},%s,"timings_per_token":true}',
        ),
        ('{"timings_per_token":false,"stream_options":{},%s}', "{" + BOTH + ",%s}"),
        (
            '{"stream_options":{"x" : "\\ud800"},%s}',
            '{"timings_per_token":true,"stream_options":{"include_usage":true,"x" : "\\ud800"},%s}',
        ),
        (
            '{"stream_options":{"include_usage" : false },%s}',
            '{"timings_per_token":true,"stream_options":{"include_usage" : true },%s}',
        ),
        ("{" + BOTH + ",%s}", "{" + BOTH + ",%s}"),
        # what the server would refuse, or take for nothing, is left to it
        ('{"stream_options":false,"timings_per_token":0,%s}', '{"stream_options":false,"timings_per_token":0,%s}'),
        (
            '{"stream_options":{"include_usage":0},"timings_per_token":[],%s}',
            '{"stream_options":{"include_usage":0},"timings_per_token":[],%s}',
        ),
        ('{"stream_options":"x","timings_per_token":1,%s}', '{"stream_options":"x","timings_per_token":1,%s}'),
        (
            '{"stream_options":{"include_usage":1},"timings_per_token":"",%s}',
            '{"stream_options":{"include_usage":1},"timings_per_token":"",%s}',
        ),
    ],
)
def test_what_is_added_to_a_stream(body: str, result: str) -> None:
    body, result = (text.replace("%s", '"model":"real","stream":true') for text in (body, result))
    assert out(body) == result.encode()
    call, _ = parse(CHAT, body.encode())
    # the meter takes out what was added, no more and no less
    assert call.wants_usage == (
        value_of(body.encode(), "stream_options") == value_of(result.encode(), "stream_options")
    )
    assert call.wants_timings == (
        value_of(body.encode(), "timings_per_token") == value_of(result.encode(), "timings_per_token")
    )


def test_nothing_is_added_where_nothing_is_generated() -> None:
    body = b'{"model":"real","stream":true,"input":"x"}'
    call, fields = parse(EMBEDDINGS, body)
    assert not call.added
    assert outgoing(call, "real", fields) is body


def test_fields_put_and_dropped() -> None:
    body = '{"model":"real", "id_slot": 3 ,"n":1,"lora":[]}'
    assert out(body, drop=("id_slot", "lora")) == b'{"model":"real","n":1}'
    assert out(body, put={"n": 5, "max_tokens": 7}) == b'{"max_tokens":7,"model":"real", "id_slot": 3 ,"n":5,"lora":[]}'
    assert out('{"id_slot":1}', drop=("id_slot",)) == b'{"model":"real"}'
    assert out('{"id_slot":1, "model":"real","id_slot":2}', drop=("id_slot",)) == b'{ "model":"real"}'
    assert splice(b'{"a":1}', {}, ("a",)) == b"{}"


def test_names_of_any_kind() -> None:
    for model in ("x" * 300, "org/name:tag v1 %20", "模型😀", 'a"b\\c', "\u2028", "nul\0"):
        result = out('{"model":"fast","x":1}', model)
        assert json.loads(result) == {"model": model, "x": 1}
        call, fields = parse(CHAT, json.dumps({"model": model}).encode())
        assert call.model == model
        assert outgoing(call, model, fields) is call.body


# What is refused, and what is not


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not JSON"),
        (b'{"a":1} x', "not JSON"),
        (b"{'a':1}", "not JSON"),
        (b'{"a":"\x00"}', "not JSON"),
        (b'{"a":"\n"}', "not JSON"),
        (b'\x00{"a":1}', "not JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b'{"a":NaN,"b":' + b"9" * 4500 + b"}", "NaN"),
        (b'{"b":' + b"9" * 4500 + b',"a":Infinity}', "Infinity"),
        (b'{"b":' + b"9" * 4500 + b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"9" * 5000, "not a JSON object"),
        (b"\xff", "not UTF-8 (byte 0)"),
        (b'{"a":"\xe9"}', "not UTF-8 (byte 6)"),
        (b'{"a":"\xed\xa0\x80"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a":1}', "byte order mark"),
        ('{"a":1}'.encode("utf-16"), "UTF-8"),
        ('{"a":1}'.encode("utf-16-le"), "not JSON"),
        ('{"a":1}'.encode("utf-32"), "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_what_is_no_json_object(body: bytes, words: str) -> None:
    error = refused(body)
    assert error.code == "invalid_json"
    assert words in error.message
    with pytest.raises(ApiError, match="The body"):
        decode(body)


@pytest.mark.parametrize("depth", [100, 400, 900, 960, 980, 990, 1000, 5000, 10_000, 30_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"model":', "}")])
def test_deep_nesting_is_refused_or_passes(depth: int, left: str, right: str) -> None:
    deep = left * depth + "1" + right * depth
    body = f'{{"x":{deep},"model":"fast","stream_options":{{"x":{deep}}},"stream":true,"model":"fast"}}'.encode()
    result = read_or_refuse(CHAT, body)
    if isinstance(result, ApiError):
        assert depth >= 900
    else:
        assert result.count(b'"model":"real"') == 2
        assert len(result) == len(body) + len(b'"timings_per_token":true,"include_usage":true,')


@pytest.mark.parametrize(
    "model", [b"123", b"true", b"[]", b'{"a":1}', b"1.5", b'"\\ud800"', b'"a\\udfff"', b"9" * 4500]
)
def test_models_that_are_none(model: bytes) -> None:
    error = refused(b'{"model":' + model + b"}")
    assert (error.code, error.param) == ("invalid_request", "model")


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b'{"model":"x","model":null}'])
def test_no_model(body: bytes) -> None:
    assert parse(CHAT, body)[0].model is None


def test_numbers_of_any_length_pass() -> None:
    huge = "9" * 4500
    numbers = f'"a":{huge},"b":-{huge},"c":1e999,"seed":{2**64}'
    body = f'{{{numbers},"stream_options":{{"x":{huge}}},"model":"fast","stream":true}}'
    result = out(body).decode()
    wanted = body.replace("fast", "real").replace('{"x"', '{"include_usage":true,"x"')
    assert result == '{"timings_per_token":true,' + wanted[1:]
    assert parse(CHAT, body.encode())[1]["seed"] == 2**64


@settings(deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | bodies.map(lambda body: body.encode()[:-1]))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for endpoint in (CHAT, TEXT, EMBEDDINGS):
        read_or_refuse(endpoint, body)


# What is read


def parsed(endpoint: Any = CHAT, **fields: Any) -> Call:
    return parse(endpoint, json.dumps(fields).encode())[0]


@pytest.mark.parametrize(
    ("n", "choices"),
    [
        (1, 1),
        (2, 2),
        (0, 1),
        (-3, 1),
        (None, 1),
        (True, 1),
        ("2", 1),
        (2.0, 2),
        (2.9, 2),
        (10**30, 1),
        (1e300, 1),
        ([2], 1),
    ],
)
def test_choices(n: Any, choices: int) -> None:
    assert parsed(n=n).n == parsed(n=n).choices == choices
    assert parsed(n_cmpl=n, n=3).n == (3 if n is None else choices)
    assert parsed(EMBEDDINGS, n=n).n == 1


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", 1), (["a"], 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["a", [1]], 2), ([], 1),
        (None, 1), (["a", 5], 1), ([5, "a"], 1), ([{"prompt_string": "a"}, "b"], 2), ({"prompt_string": "a"}, 1),
        ([None, None], 1),
    ],
)  # fmt: skip
def test_prompts(prompt: Any, prompts: int) -> None:
    assert parsed(TEXT, prompt=prompt).prompts == prompts
    assert parsed(TEXT, prompt=prompt, n=2).choices == 2 * prompts
    assert parsed(CHAT, prompt=prompt).prompts == 1


def test_what_else_is_kept() -> None:
    call = parsed(model="m", stream=True, messages=[])
    assert (call.model, call.stream, call.keys) == ("m", True, {"model", "stream", "messages"})
    assert call.added
    assert call.estimate == len(call.body) // 4 + 1
    assert not parsed(stream=1).stream
    assert parse(CHAT, b'{"model":"a","model":"b"}')[0].model == "b"


def test_values_read_wherever_they_stand() -> None:
    assert read(b'{"a":1}') == {"a": 1}
    for text in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000, '{"a":1}'.encode("utf-16")):
        assert read(text) is None
        assert read_at(text, 0) is None or text[:1] == b"9"
    assert read_at(b'xx{"a":[1]} and \xff more', 2) == {"a": [1]}
    assert value_of(b'{"a":1,"\\u0061": 2 }', "a") == b"2"
    assert value_of(b'{"b":1}', "a") is None
