"""Names and keys, as the official client meets them."""

from __future__ import annotations

import asyncio
import time

import pytest

from .conftest import User
from .test_answers import LONG, says

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.real


async def test_an_alias(user: User) -> None:
    await user.daemon.cli("aliases", "set", "tiny", user.model)
    end = time.monotonic() + 1
    while "tiny" not in [model.id async for model in user.client.models.list()]:
        assert time.monotonic() < end, "not in force within a second"
        await asyncio.sleep(0.02)
    answer = await user.client.chat.completions.create(model="tiny", messages=says("Hello."), max_tokens=3)
    row = user.row_of(answer)
    assert (row["model_name"], row["real_model_name"]) == ("tiny", user.model)
    await user.daemon.cli("aliases", "remove", "tiny")


async def test_an_unknown_model_is_told_with_those_there_are(user: User) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await user.client.chat.completions.create(model="nothing", messages=says("Hello."))
    assert refused.value.code == "model_not_found"
    assert user.model in refused.value.message
    assert user.rows == []


async def test_the_servers_own_refusal_comes_through(user: User) -> None:
    with pytest.raises(openai.BadRequestError, match="n'"):
        await user.client.chat.completions.create(model=user.model, messages=says("Hello."), n=99)
    row = await user.row()
    assert (row["status"], row["outcome"], row["tokens_source"]) == (400, "server_error", "none")
    assert row["prompt_tokens"] == row["completion_tokens"] == 0


async def code_of_listing(user: User) -> str | None:
    """The code of the refusal to list models, ``None`` if there is none."""
    try:
        await user.client.models.list()
    except openai.AuthenticationError as refused:
        return refused.code
    return None


async def test_a_key_disabled_by_command_is_refused_within_a_second(user: User) -> None:
    stream = await user.client.chat.completions.create(
        model=user.model, messages=says("Tell a story."), max_tokens=60, stream=True, extra_body=LONG
    )
    await user.daemon.cli("keys", "disable", user.id)
    end = time.monotonic() + 1
    while (code := await code_of_listing(user)) is None:
        assert time.monotonic() < end, "still let in after a second"
        await asyncio.sleep(0.02)
    assert code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await user.client.chat.completions.create(model=user.model, messages=says("Hello."))
    chunks = [chunk async for chunk in stream]  # what was running goes on
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (await user.row())["completion_tokens"] == 60
