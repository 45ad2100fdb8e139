"""Counting what a server did not tell: prompts and pieces of generated text, by asking the server itself.

Used after the fact, when a client has left before the first token, or an answer told less than all. Never raises:
what cannot be found out is ``None``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from smolproxy.core.call import Call, decode
from smolproxy.core.usage import Tally, Usage
from smolproxy.daemon.servers import Server

TIMEOUT = 3.0
"""Seconds for one question."""


async def _ask(server: Server, path: str, body: Any) -> Any:
    try:
        status, answer = await server.ask("POST", path, TIMEOUT, body)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        return None
    return answer if status == 200 and type(answer) is dict else None


async def tokens_of(server: Server, text: Any, *, model: str, special: bool) -> int | None:
    """Count the tokens of a text.

    :param special: count the tokens that the server puts around a prompt.
    """
    answer = await _ask(server, "/tokenize", {"content": text, "add_special": special, "model": model})
    tokens = answer.get("tokens") if answer else None
    return len(tokens) if type(tokens) is list else None


async def prompt_tokens(server: Server, call: Call, model: str) -> int | None:
    """Count the prompt of a request, all of its prompts together."""
    fields = decode(call.body)
    endpoint = call.endpoint
    if endpoint.count_path:
        answer = await _ask(server, endpoint.count_path, {**fields, "model": model, "stream": False})
        for name in ("input_tokens", "prompt_tokens", "n_tokens"):
            if answer and type(answer.get(name)) is int:
                return int(answer[name])
        if type(fields.get("messages")) is not list:
            return None
        rendered = await _ask(server, "/apply-template", {"messages": fields["messages"], "model": model})
        prompt = rendered.get("prompt") if rendered else None
        return await tokens_of(server, prompt, model=model, special=True) if type(prompt) is str else None
    prompt = next((fields[name] for name in endpoint.prompt_fields if name in fields), None)
    parts = prompt if type(prompt) is list else [prompt]
    if all(type(part) is int for part in parts):
        return len(parts)
    total = 0
    for part in parts:
        if type(part) is list and all(type(token) is int for token in part):
            count: int | None = len(part)
        elif type(part) is str:
            count = await tokens_of(server, part, model=model, special=True)
        else:
            count = None
        if count is None:
            return None
        total += count
    return total


def _text(choice: Any) -> str:
    """Return the generated text of a choice of a plain answer."""
    if type(choice) is not dict:
        return ""
    message = choice.get("message")
    if type(message) is not dict:
        return str(choice.get("text") or "")
    calls = message.get("tool_calls")
    parts = [message.get("reasoning_content"), message.get("content")]
    for item in calls if type(calls) is list else ():
        function = item.get("function") if type(item) is dict else None
        if type(function) is dict:
            parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if type(part) is str)


async def _text_tokens(server: Server, choice: Any, model: str) -> int:
    """Count the tokens of a choice's text; by its words, if the server does not."""
    text = _text(choice)
    count = await tokens_of(server, text, model=model, special=False) if text else 0
    return len(text.split()) if count is None else count


def _all_choices(told: int, texts: list[int], reasons: list[Any]) -> int:
    """Return the tokens of all choices, where ``told`` may cover the first one only (llama-server's does).

    :param texts: tokens in the text of each choice.
    :param reasons: the finish reason of each.
    """
    if abs(told - sum(texts)) <= abs(told - texts[0]):
        return told
    # The token that ends a choice is generated but not in its text: the first one shows whether it is counted.
    ending = 1 if told > texts[0] or reasons[0] == "length" else 0
    return told + sum(
        text + (ending if reason != "length" else 0) for text, reason in zip(texts[1:], reasons[1:], strict=True)
    )


async def settle_plain(server: Server, call: Call, model: str, tally: Tally, answer: dict[str, Any] | None) -> Usage:
    """Return the usage of a plain answer, with the choices and prompts that the server's own numbers left out."""
    counts, source = tally.counts()
    prompt, cached, completion = counts
    choices = answer.get("choices") if answer else None
    if call.endpoint.generates and type(choices) is list and choices and (completion is None or len(choices) > 1):
        texts = [await _text_tokens(server, choice, model) for choice in choices]
        if completion is None:
            completion = sum(texts)
        else:
            reasons = [choice.get("finish_reason") if type(choice) is dict else None for choice in choices]
            completion = _all_choices(completion, texts, reasons)
    if prompt is None or call.prompts > 1:
        prompt = max(prompt or 0, await prompt_tokens(server, call, model) or 0)
    return Usage(prompt, cached or 0, completion or 0, source, tally.prompt_ms, tally.predicted_ms)


async def settle_cut_short(server: Server, call: Call, model: str, tally: Tally) -> Usage:
    """Return the usage of an answer that did not come to its end."""
    prompt, cached, completion = tally.counts()[0]
    if prompt is None:
        prompt = await prompt_tokens(server, call, model)
    return Usage(prompt or 0, cached or 0, completion or 0, "counted", tally.prompt_ms, tally.predicted_ms)
