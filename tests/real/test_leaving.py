"""Clients that leave: what their rows say, held against the server's own counters, and that the slot is free again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from .conftest import Llama, User
from .test_answers import LONG, says

pytestmark = pytest.mark.real

FREE_WITHIN = 5.0  # seconds; that many for a busy machine
BEHIND = 4
"""Tokens that the server may have made between a client's leaving and its noticing. Mostly it is none or one."""


def left(row: dict[str, Any]) -> bool:
    """Whether a row is one of a client that left."""
    return (row["outcome"], row["tokens_source"]) == ("client_disconnect", "counted")


@pytest.mark.parametrize("n", [1, 2])
async def test_in_the_middle_of_a_stream(user: User, llama: Llama, n: int) -> None:
    before = await llama.counters()
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says("Tell a story."), max_tokens=1500, n=n, stream=True, extra_body=LONG
    )
    seen = 0
    async for chunk in stream:
        seen += any(choice.delta.content for choice in chunk.choices)
        if seen == 12:
            break
    await stream.close()
    await llama.idle(within=FREE_WITHIN)
    row, counted = await user.row(), (await llama.counters()).since(before)
    assert left(row)
    assert (row["status"], row["stream"]) == (200, 1)
    assert (row["prompt_tokens"], row["cached_tokens"]) == (counted.prompt, counted.cached)
    assert 12 <= row["completion_tokens"] <= counted.generated <= row["completion_tokens"] + BEHIND * n


async def test_before_the_first_token(user: User, llama: Llama) -> None:
    messages = says(" ".join(f"Number {number} is {number * 7}." for number in range(70)))
    count = json.loads(await llama.ask("POST", "/v1/chat/completions/input_tokens", {"messages": messages}))
    before = await llama.counters()
    # the head of a streamed answer comes at once, long before the first token
    stream = await user.client.chat.completions.create(model=user.model, messages=messages, max_tokens=50, stream=True)
    await llama.at_work()
    await stream.close()
    await llama.idle()
    row, counted = await user.row(), (await llama.counters()).since(before)
    assert left(row)
    assert row["ttft_ms"] is None
    assert row["prompt_tokens"] == count["input_tokens"] > 600
    assert row["completion_tokens"] == 0
    # a machine that is fast enough has processed all of it before the server noticed
    assert counted.prompt <= row["prompt_tokens"]
    assert counted.generated <= BEHIND


@pytest.mark.parametrize("n", [1, 2])
async def test_a_plain_request(user: User, llama: Llama, n: int) -> None:
    before = await llama.counters()
    asking = asyncio.create_task(
        user.client.chat.completions.create(
            model=user.model, messages=says("Tell a long tale."), max_tokens=1500, n=n, extra_body=LONG
        )
    )
    slots = await llama.at_work(made=10)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    row = await user.row()
    await llama.idle()
    counted = (await llama.counters()).since(before)
    assert left(row)
    assert row["stream"] == 0
    assert (row["prompt_tokens"], row["cached_tokens"]) == (counted.prompt, counted.cached)
    made = sum(slot["next_token"][0]["n_decoded"] for slot in slots)
    assert 10 * n <= made <= row["completion_tokens"] <= counted.generated < 1500 * n


async def test_one_who_leaves_takes_nothing_from_one_who_stays(user: User, llama: Llama) -> None:
    before = await llama.counters()
    staying = await user.client.chat.completions.create(
        model=user.model, messages=says("Tell of the sea."), max_tokens=40, stream=True, extra_body=LONG
    )
    leaving = await user.client.chat.completions.create(
        model=user.model, messages=says("Tell of the hills."), max_tokens=1500, stream=True, extra_body=LONG
    )
    await anext(aiter(leaving))
    began = time.monotonic()
    await leaving.close()
    chunks = [chunk async for chunk in staying]
    assert chunks[-1].choices[0].finish_reason == "length"
    await llama.idle(within=FREE_WITHIN + time.monotonic() - began)
    stayed, counted = user.row_of(staying), (await llama.counters()).since(before)
    gone = user.row_of(leaving)
    assert left(gone)
    assert (stayed["outcome"], stayed["completion_tokens"]) == ("ok", 40)
    assert stayed["prompt_tokens"] + gone["prompt_tokens"] == counted.prompt
    assert 0 <= counted.generated - 40 - gone["completion_tokens"] <= BEHIND
