"""Fifty requests of all kinds, four at a time: the rows add up to what the server itself has counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from .conftest import Llama, User
from .llama import SLOTS
from .test_answers import LONG, says
from .test_leaving import BEHIND

pytestmark = pytest.mark.real

Kind = Callable[[User, int], Coroutine[Any, Any, None]]


async def plain(user: User, number: int) -> None:
    await user.client.chat.completions.create(
        model=user.model, messages=says(f"Say {number}."), max_tokens=3 + number % 7
    )


async def streamed(user: User, number: int) -> None:
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says(f"Say {number}."), max_tokens=3 + number % 7, stream=True
    )
    assert [chunk async for chunk in stream]


async def text(user: User, number: int) -> None:
    await user.client.completions.create(model=user.model, prompt=f"{number} is", max_tokens=5)


async def streamed_text(user: User, number: int) -> None:
    stream = await user.client.completions.create(model=user.model, prompt=f"{number} was", max_tokens=5, stream=True)
    assert [chunk async for chunk in stream]


async def two_choices(user: User, number: int) -> None:
    await user.client.chat.completions.create(
        model=user.model, messages=says(f"Tell {number}."), max_tokens=6, n=2, extra_body=LONG
    )


async def two_streamed_choices(user: User, number: int) -> None:
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says(f"Tell {number}."), max_tokens=6, n=2, stream=True
    )
    assert [chunk async for chunk in stream]


async def prompts(user: User, number: int) -> None:
    await user.client.completions.create(
        model=user.model, prompt=[f"{number} may", "It is never"], max_tokens=4, extra_body=LONG
    )


async def streamed_prompts(user: User, number: int) -> None:
    stream = await user.client.completions.create(
        model=user.model, prompt=[f"{number} can", "It was ever"], max_tokens=4, stream=True
    )
    assert [chunk async for chunk in stream]


async def embeddings(user: User, number: int) -> None:
    await user.client.embeddings.create(model=user.model, input=[f"{number} birds", "a fish"])


async def left(user: User, number: int) -> None:
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says(f"Write {number} lines."), max_tokens=1500, stream=True, extra_body=LONG
    )
    seen = 0
    async for chunk in stream:
        seen += bool(chunk.choices and chunk.choices[0].delta.content)
        if seen > number % 9:
            break
    await stream.close()


KINDS: tuple[Kind, ...] = (
    *(plain, streamed, text, streamed_text, two_choices),
    *(two_streamed_choices, prompts, streamed_prompts, embeddings, left),
)
RUN = KINDS * 5


async def test_fifty_requests(user: User, llama: Llama) -> None:
    before = await llama.counters()
    turns = asyncio.Semaphore(SLOTS)

    async def ask(number: int, kind: Kind) -> None:
        async with turns:
            await kind(user, number)

    await asyncio.gather(*(ask(number, kind) for number, kind in enumerate(RUN)))
    await llama.idle()
    rows, counted = user.rows, (await llama.counters()).since(before)

    assert len(rows) == len(RUN) == 50
    leavers = RUN.count(left)
    assert Counter((row["outcome"], row["tokens_source"]) for row in rows) == {
        ("ok", "usage"): 50 - leavers,
        ("client_disconnect", "counted"): leavers,
    }
    assert sum(row["prompt_tokens"] for row in rows) == counted.prompt
    # of a list of prompts a plain answer tells the cached part of the first only
    untold = counted.cached - sum(row["cached_tokens"] for row in rows)
    assert 0 <= untold <= 4 * RUN.count(prompts)
    # what was made for those who left, between their leaving and its notice
    assert 0 <= counted.generated - sum(row["completion_tokens"] for row in rows) <= leavers * BEHIND

    report = json.loads((await user.daemon.cli("usage", "--key", user.id, "--json")).out)
    assert sum(line["request_count"] for line in report["summary"]) == 50
    assert sum(line["total_prompt_tokens"] for line in report["summary"]) == counted.prompt
