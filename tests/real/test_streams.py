"""A stream through smolproxy is the stream the server would have sent by itself."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import Llama, User
from .test_answers import TOOL, says

pytestmark = pytest.mark.real

# The same work each time: the likeliest token, nothing from a cache.
SAME: dict[str, Any] = {"stream": True, "temperature": 0, "cache_prompt": False, "max_tokens": 12}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"stream_options": {"include_usage": True}}


def masked(stream: bytes) -> list[bytes]:
    """The events of a stream without what differs from one time to the next: ids, dates, measurements."""
    stream = re.sub(rb'"id":"[^"]*"', b'"id":"ID"', stream)
    stream = re.sub(rb'"(created|\w+_ms|\w+_per_second)":[-\d.e+]+', rb'"\1":0', stream)
    return stream.split(b"\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, {"messages": says("Name a bird.")}, id="chat"),
        pytest.param(CHAT, {"messages": says("Name a bird."), **ASKED}, id="chat with usage"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "timings_per_token": True}, id="chat with timings"),
        pytest.param(CHAT, {"messages": says("Name a bird."), **ASKED, "timings_per_token": True}, id="chat with both"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "logprobs": True}, id="chat with probabilities"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "return_progress": True}, id="chat with progress"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "tools": [TOOL]}, id="chat with tools"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "n": 2}, id="two choices"),
        pytest.param(CHAT, {"messages": says("Name a bird."), "n": 2, **ASKED}, id="two choices with usage"),
        pytest.param(TEXT, {"prompt": "Birds are"}, id="text"),
        pytest.param(TEXT, {"prompt": "Birds are", **ASKED}, id="text with usage"),
        pytest.param(TEXT, {"prompt": ["Birds are", "A fish is never"]}, id="two texts"),
    ],
)
async def test_it_is_the_same(user: User, llama: Llama, path: str, body: dict[str, Any]) -> None:
    body = {**SAME, **body, "model": user.model}
    direct = masked(await llama.ask("POST", path, body))
    proxied = masked((await user.daemon.ask("POST", path, key=user.key, json=body)).body)
    if body.get("n") == 2 or type(body.get("prompt")) is list:
        direct, proxied = sorted(direct), sorted(proxied)  # which one is ahead is not always the same
    assert proxied == direct
    assert len(direct) > 12
