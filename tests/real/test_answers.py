"""What users get and what the books say, for each kind of answer, held against the server's own counters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Llama, User

pytestmark = pytest.mark.real

LONG = {"ignore_eos": True}
"""Makes an answer as long as it may be."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
}


def says(text: str) -> list[Any]:
    """The messages of a chat."""
    return [{"role": "user", "content": text}]


def numbers(row: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, cached and generated tokens of a row."""
    return row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]


def told(usage: Any) -> tuple[int, int, int]:
    """The same of a usage object of the client."""
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, details.cached_tokens if details else 0, getattr(usage, "completion_tokens", 0)


async def test_plain_chat(user: User, llama: Llama) -> None:
    before = await llama.counters()
    answer = await user.client.chat.completions.create(
        model=user.model, messages=says("Name a colour."), max_tokens=12, extra_body=LONG
    )
    row, counted = user.row_of(answer), (await llama.counters()).since(before)
    assert numbers(row) == told(answer.usage) == (counted.prompt, counted.cached, counted.generated)
    assert row["completion_tokens"] == 12
    assert answer.choices[0].message.content
    assert row["real_model_name"] == user.model
    assert (row["endpoint"], row["stream"], row["status"]) == ("/v1/chat/completions", 0, 200)
    assert (row["outcome"], row["tokens_source"]) == ("ok", "usage")
    assert row["ttft_ms"] is None
    assert 0 < row["prompt_ms"] + row["predicted_ms"] < row["duration_ms"]


@pytest.mark.parametrize("asked", [True, False], ids=["usage", "no usage"])
async def test_streamed_chat(user: User, llama: Llama, asked: bool) -> None:
    before = await llama.counters()
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says("Name a river."), max_tokens=12, stream=True, extra_body=LONG, **options
    )
    chunks = [chunk async for chunk in stream]
    row, counted = user.row_of(stream), (await llama.counters()).since(before)
    assert numbers(row) == (counted.prompt, counted.cached, counted.generated)
    assert row["completion_tokens"] == 12
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [told(chunk.usage) for chunk in chunks if chunk.usage] == ([numbers(row)] if asked else [])
    assert (row["outcome"], row["tokens_source"], row["stream"]) == ("ok", "usage", 1)
    assert 0 < row["ttft_ms"] < row["duration_ms"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("prompt", ["The moon", ["The moon", "A cat sat on the"], [2, 818, 5], [[2, 818], [2, 5, 9]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_completions(user: User, llama: Llama, prompt: Any, stream: bool, n: int) -> None:
    prompts = 2 if len(prompt) == 2 else 1
    before = await llama.counters()
    answer: Any = await user.client.completions.create(
        model=user.model, prompt=prompt, max_tokens=6, n=n, stream=stream, extra_body=LONG
    )
    seen = set()
    if stream:
        async for chunk in answer:
            seen.update(choice.index for choice in (chunk.choices if chunk else ()))
    else:
        seen = {choice.index for choice in answer.choices}
    assert seen == set(range(prompts * n))
    row, counted = user.row_of(answer), (await llama.counters()).since(before)
    assert row["prompt_tokens"] == counted.prompt
    assert row["completion_tokens"] == counted.generated == 6 * prompts * n
    if stream or prompts == 1:
        assert row["cached_tokens"] == counted.cached
    else:  # a plain answer tells the cached part of the first prompt only
        assert row["cached_tokens"] <= counted.cached
    assert (row["endpoint"], row["outcome"], row["tokens_source"]) == ("/v1/completions", "ok", "usage")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_all_choices_count(user: User, llama: Llama, stream: bool) -> None:
    before = await llama.counters()
    answer: Any = await user.client.chat.completions.create(
        model=user.model, messages=says("Name a tree."), max_tokens=9, n=3, stream=stream, extra_body=LONG
    )
    if stream:
        async for _ in answer:
            pass
    else:
        assert (len(answer.choices), answer.usage.completion_tokens) == (3, 9), "the server's own usage has changed"
    row, counted = user.row_of(answer), (await llama.counters()).since(before)
    assert numbers(row) == (counted.prompt, counted.cached, counted.generated)
    assert row["completion_tokens"] == 27


async def test_choices_that_end_by_themselves_count_with_the_token_that_ends_them(user: User, llama: Llama) -> None:
    before = await llama.counters()
    answer = await user.client.completions.create(
        model=user.model,
        prompt="Count: one, two,",
        n=3,
        max_tokens=40,
        temperature=0,
        extra_body={"grammar": 'root ::= " three, four"'},
    )
    assert {(choice.text, choice.finish_reason) for choice in answer.choices} == {(" three, four", "stop")}
    counted = (await llama.counters()).since(before)
    assert numbers(user.row_of(answer)) == (counted.prompt, counted.cached, counted.generated)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("input", ["a cat", ["a cat", "a very long dog"], [[2, 818], [2, 5, 9]]])
async def test_embeddings(user: User, llama: Llama, input: Any, encoding: Any) -> None:
    before = await llama.counters()
    answer = await user.client.embeddings.create(model=user.model, input=input, encoding_format=encoding)
    row, counted = user.row_of(answer), (await llama.counters()).since(before)
    assert numbers(row) == (answer.usage.prompt_tokens, 0, 0) == (counted.prompt, counted.cached, counted.generated)
    assert len(answer.data) == (1 if input == "a cat" else 2)
    assert all(type(each.embedding) is (str if encoding == "base64" else list) for each in answer.data)
    assert (row["endpoint"], row["outcome"], row["tokens_source"]) == ("/v1/embeddings", "ok", "usage")


async def test_the_cached_part_of_a_second_identical_prompt(user: User, llama: Llama) -> None:
    rows, counts = [], []
    for _ in range(2):
        before = await llama.counters()
        answer = await user.client.chat.completions.create(
            model=user.model, messages=says("Which of the seven seas is the deepest, and why?"), max_tokens=4
        )
        rows.append(user.row_of(answer))
        counts.append((await llama.counters()).since(before))
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"] > 20
    assert rows[1]["cached_tokens"] > rows[1]["prompt_tokens"] // 2
    assert [row["cached_tokens"] for row in rows] == [counted.cached for counted in counts]
    assert [row["prompt_tokens"] for row in rows] == [counted.prompt for counted in counts]


async def test_an_answer_that_fits_a_schema(user: User, llama: Llama) -> None:
    before = await llama.counters()
    stream = await user.client.chat.completions.create(
        model=user.model,
        messages=says('Say {"colour": "red"} or {"colour": "blue"}.'),
        response_format={"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}},
        max_tokens=60,
        temperature=0,
        stream=True,
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert json.loads(text)["colour"] in ("red", "blue")
    counted = (await llama.counters()).since(before)
    assert numbers(user.row_of(stream)) == (counted.prompt, counted.cached, counted.generated)


async def test_a_streamed_tool_call(user: User, llama: Llama) -> None:
    def called(city: str, answer: str) -> list[Any]:
        call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        return [
            *says(f"Weather in {city}?"),
            {"role": "assistant", "content": "", "tool_calls": [{"id": city, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": city, "content": answer},
        ]

    before = await llama.counters()
    stream = await user.client.chat.completions.create(
        model=user.model,
        # two calls before, so that even a small model knows what to do
        messages=[*called("Rome", "sunny"), *called("Paris", "rain"), *says("Weather in Paris?")],
        tools=[TOOL],  # type: ignore[list-item]
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function is not None
    assert calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments or "" for call in calls if call.function and call.index == 0)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    counted = (await llama.counters()).since(before)
    row = user.row_of(stream)
    assert numbers(row) == (counted.prompt, counted.cached, counted.generated)
    assert row["completion_tokens"] > len(calls), "the tokens around a call have no deltas"
