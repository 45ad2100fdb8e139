"""Counting what a server did not tell: prompts, choices and cut-off answers, with the help of the server itself.

Used after the fact, when a client has left, or an answer told less than all. Where the server does not help either,
the text at hand is estimated. Nothing here raises.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple, TypeVar

from smolproxy.core.call import Call, decode
from smolproxy.core.usage import Counts, Tally, Usage, read_timings
from smolproxy.daemon.questions import Questions, Slot
from smolproxy.daemon.servers import Server

PATIENCE = 3.0
"""Seconds for all questions while a client waits for its answer."""

PATIENCE_AFTERWARDS = 8.0
"""Seconds for all questions when nobody waits; less than what the end of the daemon leaves for them."""

_T = TypeVar("_T")


async def settle_plain(server: Server, call: Call, model: str, tally: Tally, answer: dict[str, Any] | None) -> Usage:
    """Return the usage of a plain answer, with the choices and prompts that the server's own numbers left out."""
    counts, source = tally.counts()
    prompt, cached, completion = counts
    answer = answer or {}
    choices = answer.get("choices")
    questions = Questions(server, model, PATIENCE)
    if call.endpoint.generates and type(choices) is list and choices and (completion is None or len(choices) > 1):
        completion = await _completion(questions, call, completion, choices, read_timings(answer.get("timings")))
    if prompt is None or call.prompts > 1:
        counted = sum(await _prompt_counts(questions, call))
        if prompt is None or not questions.unanswered:  # an estimate is no better than what the server told
            prompt = max(prompt or 0, counted)
    return Usage(prompt, cached or 0, completion or 0, source, tally.prompt_ms, tally.predicted_ms)


async def settle_cut_short(
    server: Server, call: Call, model: str, tally: Tally, patience: float = PATIENCE_AFTERWARDS
) -> Usage:
    """Return the usage of an answer that did not come to its end.

    :param patience: seconds for all questions.
    """
    prompt, cached, completion = tally.counts()[0]
    questions = Questions(server, model, patience)
    slots: list[Slot] = []
    if completion is None and call.endpoint.generates and not call.stream:
        # The server notices only after a second or more that the client of a plain request has left. So its slots
        # can be seen at work still, with all that was made until now.
        slots = await questions.slots()
    if prompt is None or call.prompts > 1:
        counts = await _prompt_counts(questions, call)
        prompt = max(prompt or 0, sum(counts))
        if slots:
            cached, completion = _made(slots, counts, call.n)
    return Usage(prompt, cached or 0, completion or 0, "counted", tally.prompt_ms, tally.predicted_ms)


# Prompts.


async def _prompt_counts(questions: Questions, call: Call) -> list[int]:
    """Count each prompt of a request."""
    fields = decode(call.body)
    if not call.endpoint.prompt_fields:
        return [await _chat_tokens(questions, call, fields)]
    prompt: Any = next((fields[name] for name in call.endpoint.prompt_fields if name in fields), None)
    # numbers in a list, alone or between texts, make it one prompt
    several = type(prompt) is list and not any(type(part) is int for part in prompt)
    return await _gather(_part_tokens(questions, part) for part in (prompt if several else [prompt]))


async def _chat_tokens(questions: Questions, call: Call, fields: dict[str, Any]) -> int:
    body = {**fields, "model": questions.model, "stream": False}
    if call.endpoint.count_path:
        count = await questions.field(call.endpoint.count_path, body, "input_tokens", "prompt_tokens", "n_tokens")
        if type(count) is int:
            return count
    prompt = await questions.field("/apply-template", body, "prompt")
    if type(prompt) is str:
        return await _text_tokens(questions, prompt, special=True)
    return sum(map(_estimate, _texts(fields.get("messages"))))


async def _part_tokens(questions: Questions, part: Any) -> int:
    """Count one prompt of completions or embeddings: a text, token numbers, or both mixed."""
    if type(part) is not list:
        return await _text_tokens(questions, part, special=True) if type(part) is str else 0
    texts = await _gather(
        _text_tokens(questions, text, special=at == 0) for at, text in enumerate(part) if type(text) is str
    )
    return sum(texts) + sum(type(token) is int for token in part)


def _texts(value: Any) -> list[str]:
    """Return the texts of messages, images and the like left out."""
    if type(value) is str:
        return [value]
    if type(value) is dict:
        value = [value.get("content"), value.get("text")]
    return [text for part in value for text in _texts(part)] if type(value) is list else []


async def _text_tokens(questions: Questions, text: str, *, special: bool) -> int:
    """Count the tokens of a text, by an estimate if the server does not."""
    if not text and not special:
        return 0
    count = await questions.tokens(text, special=special)
    return _estimate(text) if count is None else count


def _estimate(text: str) -> int:
    """Estimate the tokens of a text: its words, or one for every four characters if that is more."""
    return max(len(text.split()), len(text) // 4)


async def _gather(counts: Iterable[Awaitable[_T]]) -> list[_T]:
    return list(await asyncio.gather(*counts))


# Choices.


class _Choice(NamedTuple):
    """One choice of a plain answer.

    :param text: tokens in its text.
    :param whole: all its tokens, if the answer tells.
    :param hides: it has tokens that its text does not show: those around a tool call or reasoning.
    """

    text: int
    reason: Any
    whole: int | None
    hides: bool

    def tokens(self, limit: int | None, ending: int, *, sure: bool = False) -> int:
        """Return all tokens that were generated for it.

        :param limit: tokens that it was allowed.
        :param ending: tokens that ended it and are not in its text.
        :param sure: the limit is known to be what cut it off, and not a full context or a lower limit enforced.
        """
        if self.whole is not None:
            return self.whole
        if self.reason != "length":
            return self.text + ending
        # A text is not always taken apart into the tokens it was made of; one cut off at its limit has that many.
        if limit is not None and (sure or abs(limit - self.text) <= 2 + limit // 8):
            return limit
        return self.text


async def _completion(
    questions: Questions, call: Call, told: int | None, choices: list[Any], timings: Counts | None
) -> int:
    """Return the tokens of all choices, where ``told`` may cover the first one only (llama-server's does)."""
    fields = decode(call.body)
    read = await _gather(_choice(questions, choice, stops=bool(fields.get("stop"))) for choice in choices)
    first, others = read[0], read[1:]
    limit = _limit(fields)
    if told is None:
        return sum(choice.tokens(limit, 1) for choice in read)
    if timings is not None and timings.completion is not None:
        covers_all = told > timings.completion  # which is of the first choice
    elif questions.unanswered:
        covers_all = True  # no llama-server: others tell all choices
    else:
        only_first = first.tokens(limit, 1)
        everything = only_first + sum(choice.tokens(limit, 1) for choice in others)
        covers_all = abs(told - everything) <= abs(told - only_first)
    if covers_all:
        return told
    # What cut off the first choice of a prompt cut off the others. For those of other prompts it is the limit asked
    # for, if that is what cut off the first.
    sure = first.reason == "length" and (call.prompts == 1 or told == limit)
    # The token that ends a choice is generated but not in its text: the first one shows whether it is counted,
    # and how many there are where a text stopped it or tokens are hidden.
    ending = 1 if first.reason == "length" or first.whole else max(0, told - first.text)
    if not (first.hides or fields.get("stop")):
        ending = min(1, ending)
    return told + sum(
        choice.tokens(told if sure else limit, ending if choice.hides == first.hides else 1, sure=sure)
        for choice in others
    )


async def _choice(questions: Questions, choice: Any, *, stops: bool) -> _Choice:
    if type(choice) is not dict:
        return _Choice(0, None, None, False)
    parts, hides = [choice.get("text")], False
    message = choice.get("message")
    if type(message) is dict:
        calls = message.get("tool_calls")
        hides = bool(calls or message.get("reasoning_content"))
        parts = [message.get("reasoning_content"), message.get("content")]
        for item in calls if type(calls) is list else ():
            function = item.get("function") if type(item) is dict else None
            parts += [function.get("name"), function.get("arguments")] if type(function) is dict else []
    text = "".join(part for part in parts if type(part) is str)
    # one for each token; those of a text that stopped it are left out
    probabilities = choice.get("logprobs")
    each = probabilities.get("content") if type(probabilities) is dict and not stops else None
    whole = len(each) if type(each) is list and each else None
    count = 0 if whole is not None else await _text_tokens(questions, text, special=False)
    return _Choice(count, choice.get("finish_reason"), whole, hides)


def _limit(fields: dict[str, Any]) -> int | None:
    """Return the most tokens that a body allows, in the order in which llama-server looks for it."""
    for name in ("n_predict", "max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if type(value) is int:
            return max(1, value) if value >= 0 else None  # 0 makes one
    return None


# Slots.


def _made(slots: list[Slot], prompts: list[int], n: int) -> tuple[int, int]:
    """Return cached and generated tokens of the slots that worked on a request, known by the lengths of its prompts.

    Of more slots that fit those count that made the least: nobody is charged for another's tokens.
    """
    wanted = Counter({prompt: count * n for prompt, count in Counter(prompts).items()})
    cached = made = 0
    for slot in sorted(slots, key=lambda slot: slot.made):
        prompt = slot.prompt
        if prompt is None and len(slots) <= len(prompts) * n:
            made += slot.made  # the server tells no lengths, but there is no other request either
        elif prompt is not None and wanted[prompt] > 0:
            if wanted[prompt] % n == 0:  # the choices of a prompt share its processing
                cached += slot.cached
            wanted[prompt] -= 1
            made += slot.made
    return cached, made
