"""The stand-in's answers next to those that a real llama-server gave (`real_shapes/`, made by `capture.py`)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from smolproxy.standin import StandIn

from .capture import KEYED, PLAIN, exchange

FIXTURES = sorted((Path(__file__).parent / "real_shapes").glob("*.json"))


def shape(value: Any) -> Any:
    """Keys in their order and kinds of values; of a list, the kinds it holds."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        kinds: list[Any] = []
        for inner in map(shape, value):
            if inner not in kinds:
                kinds.append(inner)
        return kinds
    if value is None or isinstance(value, bool):
        return value
    return "number" if isinstance(value, int | float) else "text"


def events(writes: list[str]) -> list[list[Any]]:
    """The events of each write: JSON, or the text where it is none."""
    told = []
    for write in writes:
        assert write.endswith("\n\n")
        datas = [block.removeprefix("data: ") for block in write[:-2].split("\n\n")]
        told.append([data if data == "[DONE]" else json.loads(data) for data in datas])
    return told


def by_choice(writes: list[str]) -> dict[Any, list[Any]]:
    """Shapes of the events (with those sent in one write kept together), apart for each choice."""
    told: dict[Any, list[Any]] = {}
    for write in events(writes):
        choices = write[0]["choices"] if isinstance(write[0], dict) else []
        shapes = told.setdefault(choices[0]["index"] if choices else None, [])
        if "prompt_progress" in (write[0] or ()) and shapes == [shape(write)]:
            continue  # one for every batch of the prompt: how many is the machine's affair
        shapes.append(shape(write))
    return told


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
async def test_answers_have_the_real_shape(path: Path) -> None:
    real = json.loads(path.read_text(encoding="utf-8"))
    keyed = real["server"] == "keyed"
    async with StandIn(
        ["gemma3.gguf"], slots=2, n_ctx=256, dimensions=3 if keyed else 0, api_key="sekret" if keyed else None
    ) as server:
        ours = await asyncio.to_thread(exchange, server.port, *real["request"])
        answered = server.requests[0]
        assert (answered.done, answered.left) == (True, False)
    assert ours["status"] == real["status"]
    assert ours["closed"] == real["closed"] or real["request"][0] == "HEAD"
    values = ("Server", "Access-Control-Allow-Origin", "X-Accel-Buffering", "Content-Type", "Keep-Alive", "Connection")
    real_headers = [header for header in real["headers"] if header[0] != "Accept-Ranges"]
    assert [name for name, _ in ours["headers"]] == [name for name, _ in real_headers]
    assert [pair for pair in ours["headers"] if pair[0] in values] == [
        pair for pair in real_headers if pair[0] in values
    ]
    if "writes" in real:
        assert by_choice(ours["writes"]) == by_choice(real["writes"])
    elif path.stem == "props":  # its settings differ in their values, which say what kind they are
        assert list(ours["body"]) == list(real["body"])
        settings = "default_generation_settings"
        assert list(ours["body"][settings]["params"]) == list(real["body"][settings]["params"])
    else:
        assert shape(ours["body"]) == shape(real["body"])
        if real["status"] >= 400:
            assert ours["body"]["error"]["type"] == real["body"]["error"]["type"]


def test_every_case_was_captured() -> None:
    assert {path.stem for path in FIXTURES} == {*PLAIN, *KEYED}


async def test_loading_is_503_everywhere() -> None:
    async with StandIn(api_key="sekret") as server:
        server.loading = True
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            told = await asyncio.to_thread(exchange, server.port, method, path, {})
            assert told["status"] == 503
            assert told["body"] == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
            assert list(told["body"]["error"]) == ["message", "type", "code"]
        server.loading = False
        assert (await asyncio.to_thread(exchange, server.port, "GET", "/health"))["status"] == 200
