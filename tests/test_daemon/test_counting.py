"""Counting what a server did not tell, against what the stand-in really did."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolproxy.core.call import Call, parse
from smolproxy.core.endpoints import ENDPOINTS
from smolproxy.core.meter import PlainMeter
from smolproxy.core.usage import Tally, Usage
from smolproxy.daemon import counting
from smolproxy.daemon.questions import Questions, Slot
from smolproxy.daemon.servers import Server
from smolproxy.settings import Settings
from smolproxy.standin import KEEP, MISSING, Reply, StandIn
from smolproxy.store import servers as store

CHAT, TEXT, EMBEDDINGS = ENDPOINTS
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "say something nice"}]}
GONE = Reply(status=404)
UNTOLD = Reply(usage=MISSING, timings=MISSING)


@dataclass
class Site:
    """A stand-in, and the daemon's view of it."""

    standin: StandIn
    server: Server

    async def answer(self, call: Call) -> dict[str, Any]:
        """The stand-in's answer to a call."""
        status, answer = await self.server.ask("POST", call.endpoint.path, 10, json.loads(call.body))
        assert status == 200
        return answer

    async def settle(self, call: Call, answer: dict[str, Any] | None = None) -> Usage:
        """The usage of a plain answer, the stand-in's or the one given."""
        answer = await self.answer(call) if answer is None else answer
        meter = PlainMeter(call)
        meter.feed(json.dumps(answer).encode())
        return await counting.settle_plain(self.server, call, "m1", *meter.settle())

    async def cut(self, call: Call, patience: float = 5) -> Usage:
        """The usage of a plain answer whose client has left."""
        return await counting.settle_cut_short(self.server, call, "m1", Tally(), patience)

    @property
    def prompt(self) -> int:
        """Tokens of all prompts so far."""
        return self.standin.counters.prompt_tokens + self.standin.counters.cached

    def asked(self, path: str) -> int:
        """How often a path was asked."""
        return sum(request.path == path for request in self.standin.requests)

    def forget(self, *paths: str) -> None:
        """Let the stand-in know nothing of these paths."""
        self.standin.on.update(dict.fromkeys(paths, GONE))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with StandIn() as standin:
        record = store.Server(1, "one", standin.url, True, (), None, 0)
        server = Server(record, Settings())
        yield Site(standin, server)
        await server.close()


def call(endpoint: Any = CHAT, **fields: Any) -> Call:
    """A request."""
    return parse(endpoint, json.dumps({"model": "m1", **(HI if endpoint is CHAT else {}), **fields}).encode())[0]


def choices(*texts: str, reason: str = "stop", **more: Any) -> list[Any]:
    """Choices of an answer to a completion."""
    return [{"text": text, "index": at, "finish_reason": reason, **more} for at, text in enumerate(texts)]


def usage(completion: int, prompt: int = 4) -> dict[str, Any]:
    """A usage object."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# All choices, where the server tells the first only.


@pytest.mark.parametrize("says", [None, ["a", " b", " c"]], ids=["length", "stop"])
@pytest.mark.parametrize("timings", [True, False], ids=["timings", "no timings"])
@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2, 3])
async def test_all_choices_count(site: Site, endpoint: Any, says: Any, timings: bool, n: int) -> None:
    site.standin.default = Reply(says=says, timings=timings)
    asked = call(endpoint, n=n, max_tokens=7, **({"prompt": "a b"} if endpoint is TEXT else {}))
    answer = await site.answer(asked)
    used = await site.settle(asked, answer)
    one = 7 if says is None else 4  # the token that ends it counts
    assert answer["usage"]["completion_tokens"] == one
    assert used.completion == site.standin.counters.predicted == one * n
    assert used.prompt == site.prompt
    assert used.source == "usage"


async def test_choices_of_different_lengths(site: Site) -> None:
    answer = {"choices": choices("a b c", "a", "a b c d e"), "usage": usage(4), "timings": {"predicted_n": 4}}
    used = await site.settle(call(TEXT, prompt="x", n=3), answer)
    assert used.completion == 4 + 2 + 6


async def test_a_first_choice_that_was_made_of_more_tokens_than_its_text_shows_adds_none_to_the_others(
    site: Site,
) -> None:
    answer = {"choices": choices("a b c", "d e"), "usage": usage(9), "timings": {"predicted_n": 9}}
    assert (await site.settle(call(TEXT, prompt="x", n=2), answer)).completion == 9 + 2 + 1


async def test_choices_that_ended_at_once(site: Site) -> None:
    answer = {"choices": choices("", ""), "usage": usage(1), "timings": {"predicted_n": 1}}
    assert (await site.settle(call(TEXT, prompt="x", n=2), answer)).completion == 2
    assert site.asked("/tokenize") == 0


async def test_choices_cut_off_have_as_many_tokens_as_the_first_whatever_their_texts_say(site: Site) -> None:
    answer = {"choices": choices("a b c", "a", reason="length"), "usage": usage(50), "timings": {"predicted_n": 50}}
    assert (await site.settle(call(TEXT, prompt="x", n=2), answer)).completion == 100


@pytest.mark.parametrize(("text", "tokens"), [("a b c d e f g h i", 10), ("a b", 2)])
async def test_one_cut_off_after_a_first_that_was_not(site: Site, text: str, tokens: int) -> None:
    """It has the tokens asked for, if its text may be that long: a key's lower limit is not in the body."""
    answer = {"choices": choices("a") + choices(text, reason="length"), "usage": usage(2)}
    used = await site.settle(call(TEXT, prompt="x", n=2, max_tokens=10), {**answer, "timings": {"predicted_n": 2}})
    assert used.completion == 2 + tokens


@pytest.mark.parametrize("limit", ["n_predict", "max_completion_tokens", "max_tokens"])
async def test_the_limit_is_looked_for_where_the_server_does(site: Site, limit: str) -> None:
    fields = {"max_tokens": 200, "max_completion_tokens": 200, limit: 10}
    if limit == "n_predict":
        fields["max_completion_tokens"] = 200
    answer = {"choices": choices("a") + choices("a b c d e f g h i", reason="length"), "usage": usage(2)}
    if limit == "max_tokens":
        del fields["max_completion_tokens"]
    used = await site.settle(call(TEXT, prompt="x", n=2, **fields), {**answer, "timings": {"predicted_n": 2}})
    assert used.completion == 2 + 10


async def test_without_a_limit_the_text_counts(site: Site) -> None:
    answer = {"choices": choices("a") + choices("a b c", reason="length"), "usage": usage(2)}
    for fields in ({}, {"n_predict": -1, "max_tokens": 4}):
        used = await site.settle(call(TEXT, prompt="x", n=2, **fields), {**answer, "timings": {"predicted_n": 2}})
        assert used.completion == 2 + 3


@pytest.mark.parametrize("timings", [{"predicted_n": 4}, None], ids=["timings of the first", "no timings"])
@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_usage_that_covers_all_choices_is_not_doubled(site: Site, reason: str, timings: Any) -> None:
    tokens = 4 if reason == "stop" else 3
    answer = {"choices": choices("a b c", "d e f", reason=reason), "usage": usage(2 * tokens), "timings": timings}
    used = await site.settle(call(TEXT, prompt="x", n=2), answer)
    assert used.completion == 2 * tokens


async def test_a_server_that_cannot_count_is_taken_at_its_word(site: Site) -> None:
    """Without timings and /tokenize it is no llama-server, and others tell all choices and prompts."""
    site.forget("/tokenize")
    answer = {"choices": choices("a" * 400, "b" * 400), "usage": usage(90, prompt=11)}
    used = await site.settle(call(TEXT, prompt=["a" * 400, "b" * 400]), answer)
    assert (used.prompt, used.completion, used.source) == (11, 90, "usage")


async def test_probabilities_tell_each_token(site: Site) -> None:
    logprobs = {"content": [{"token": "x"}] * 9}
    answer = {"choices": choices("a b", "c", logprobs=logprobs), "usage": usage(9), "timings": {"predicted_n": 9}}
    assert (await site.settle(call(TEXT, prompt="x", n=2, logprobs=1), answer)).completion == 18
    assert site.asked("/tokenize") == 0


async def test_tokens_of_a_text_that_stops_an_answer_are_those_of_the_first_choice(site: Site) -> None:
    logprobs = {"content": [{"token": "x"}] * 2}  # llama-server leaves the last ones out
    answer = {"choices": choices("a b", "c d e", logprobs=logprobs), "usage": usage(5), "timings": {"predicted_n": 5}}
    used = await site.settle(call(TEXT, prompt="x", n=2, logprobs=1, stop=["three more tokens"]), answer)
    assert used.completion == 5 + 3 + 3


async def test_tokens_around_tool_calls_and_reasoning_are_those_of_the_first_choice(site: Site) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calling = {"content": None, "tool_calls": [{"type": "function", "function": function}]}
    answer = {
        "choices": [
            {"index": 0, "finish_reason": "tool_calls", "message": calling},
            {"index": 1, "finish_reason": "tool_calls", "message": calling},
            {"index": 2, "finish_reason": "stop", "message": {"content": "no tools"}},
            {"index": 3, "finish_reason": "stop", "message": {"reasoning_content": "hm", "content": " no"}},
        ],
        "usage": usage(20),
        "timings": {"predicted_n": 20},
    }
    around = 20 - 2  # the stand-in takes name and arguments for two words
    used = await site.settle(call(n=4), answer)
    assert used.completion == 20 + 20 + (2 + 1) + (2 + around)


async def test_probabilities_of_a_tool_call_leave_nothing_hidden(site: Site) -> None:
    message = {"tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}
    told = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": [{"token": "x"}] * 20}}
    answer = {"choices": [told, {**told, "logprobs": None}], "usage": usage(20), "timings": {"predicted_n": 20}}
    assert (await site.settle(call(n=2), answer)).completion == 20 + 1 + 1


@pytest.mark.parametrize("choice", [None, {}, {"message": {"tool_calls": [None, {"function": 1}]}}, {"text": 5}])
async def test_choices_of_strange_forms(site: Site, choice: Any) -> None:
    answer = {"choices": [choice, choice], "usage": usage(5), "timings": {"predicted_n": 5}}
    assert (await site.settle(call(n=2), answer)).completion >= 5


# Answers that tell nothing.


@pytest.mark.parametrize("says", [None, ["a", " b"]], ids=["length", "stop"])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_tells_nothing_is_counted(site: Site, says: Any, n: int) -> None:
    site.standin.default = Reply(says=says, usage=MISSING, timings=MISSING)
    used = await site.settle(call(n=n, max_tokens=7))
    assert used == Usage(site.prompt, 0, site.standin.counters.predicted, "counted")


async def test_timings_alone_are_enough_for_one_choice(site: Site) -> None:
    site.standin.default = Reply(usage=MISSING)
    used = await site.settle(call(max_tokens=7))
    assert used[:4] == (site.prompt, 0, 7, "timings")
    assert site.asked("/tokenize") == 0


async def test_usage_that_is_null(site: Site) -> None:
    site.standin.default = Reply(usage=None, timings=None)
    used = await site.settle(call(max_tokens=7))
    assert used == Usage(site.prompt, 0, 7, "counted")


async def test_a_server_that_counts_nothing_is_estimated(site: Site) -> None:
    site.standin.default = UNTOLD
    site.forget("/tokenize", "/apply-template", "/v1/chat/completions/input_tokens")
    content = [{"type": "text", "text": "four words of text"}, {"type": "image_url", "image_url": {"url": "d" * 999}}]
    used = await site.settle(call(messages=[{"role": "user", "content": content}], max_tokens=5))
    assert used == Usage(4, 0, 5, "counted")


async def test_an_answer_that_was_too_long_to_be_kept(site: Site) -> None:
    tally = Tally()
    used = await counting.settle_plain(site.server, call(max_tokens=7), "m1", tally, None)
    assert used.completion == 0
    assert used.prompt > 3
    assert used.source == "counted"


async def test_embeddings_without_usage(site: Site) -> None:
    site.standin.default = Reply(usage=MISSING)
    used = await site.settle(call(EMBEDDINGS, input=["a b", "c"]))
    assert used == Usage(site.prompt, 0, 0, "counted")
    assert used.prompt == 5


# Prompts.


@pytest.mark.parametrize(
    "prompt",
    ["a b c", ["a b c"], ["a b", "c d e f"], [5, 6, 7], [[5, 6], [7]], [12, "a b"], ["a b", [1, 2]], ["a b", 7], ""],
)
@pytest.mark.parametrize("reply", [Reply(usage=KEEP), UNTOLD], ids=["first told", "nothing told"])
async def test_all_prompts_count(site: Site, prompt: Any, reply: Reply) -> None:
    site.standin.default = reply
    used = await site.settle(call(TEXT, prompt=prompt, max_tokens=3))
    assert (used.prompt, used.completion) == (site.prompt, site.standin.counters.predicted)


async def test_prompts_and_choices_together(site: Site) -> None:
    used = await site.settle(call(TEXT, prompt=["a b", "c"], n=2, max_tokens=3))
    assert (used.prompt, used.completion) == (3 + 2, 12)
    assert site.standin.counters.predicted == 12


async def test_many_prompts_are_asked_a_few_at_a_time(site: Site) -> None:
    await site.settle(call(TEXT, prompt=[f"prompt {number}" for number in range(40)], max_tokens=1))
    assert site.asked("/tokenize") >= 40
    assert site.standin.connection_count <= 5


@pytest.mark.parametrize("prompt", [None, 5, {"prompt_string": "a"}, [None, {}]])
async def test_prompts_of_strange_forms(site: Site, prompt: Any) -> None:
    answer = {"choices": choices("a")}
    assert (await site.settle(call(TEXT, prompt=prompt), answer)).prompt == 0


async def test_a_server_without_input_tokens(site: Site) -> None:
    site.forget("/v1/chat/completions/input_tokens")
    site.standin.default = UNTOLD
    assert (await site.settle(call(max_tokens=1))).prompt == site.prompt


async def test_the_prompt_is_counted_for_the_model(site: Site) -> None:
    await site.cut(call(model="alias"))
    path = "/v1/chat/completions/input_tokens"
    [request] = [request for request in site.standin.requests if request.path == path]
    assert request.json == {**HI, "model": "m1", "stream": False}


# Clients that left.


class Working:
    """Plain requests that the stand-in works on, held where each has made some tokens."""

    def __init__(self, site: Site, *calls: Call) -> None:
        self.site = site
        self.tasks = [asyncio.create_task(site.answer(each)) for each in calls]

    async def __aenter__(self) -> Working:
        slots = self.site.standin.engine.slots
        await self.site.standin.wait_for(lambda: any(slot.choice and slot.choice.predicted > 2 for slot in slots))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def made(self, *prompts: int) -> int:
        """Tokens made so far for prompts of these lengths."""
        at_work = [slot.choice for slot in self.site.standin.engine.slots if slot.choice]
        return sum(choice.predicted for choice in at_work if len(choice.prompt) in prompts)


@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_plain_answer_had_made_when_its_client_left(site: Site, n: int) -> None:
    site.standin.engine.token_delay = 0.01
    asked = call(n=n, max_tokens=3000)
    async with Working(site, asked) as working:
        before = working.made(site.prompt)
        used = await site.cut(asked)
        assert used[:2] == (site.prompt, 0)
        assert used.source == "counted"
        assert 3 * n <= before <= used.completion <= working.made(site.prompt)


async def test_the_cached_part_of_a_prompt_whose_client_left(site: Site) -> None:
    await site.answer(call(max_tokens=1))
    asked = call(max_tokens=3000)
    site.standin.engine.token_delay = 0.01
    async with Working(site, asked):
        used = await site.cut(asked)
    assert used.cached == site.standin.counters.cached > 0
    assert used.prompt == site.prompt // 2


async def test_everybody_who_leaves_has_the_own_numbers(site: Site) -> None:
    site.standin.engine.token_delay = 0.01
    one, other = call(TEXT, prompt="a b", max_tokens=3000), call(TEXT, prompt=["c", "d e f"], max_tokens=3000)
    async with Working(site, one, other) as working:
        before = working.made(3), working.made(2, 4)
        first, second = await asyncio.gather(site.cut(one), site.cut(other))
        after = working.made(3), working.made(2, 4)
    assert (first.prompt, second.prompt) == (3, 6)
    assert before[0] <= first.completion <= after[0]
    assert before[1] <= second.completion <= after[1]
    assert site.asked("/slots") == 1, "each look keeps the server from noticing"


async def test_a_second_look_is_taken_later(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.cut(call())
    monkeypatch.setattr("smolproxy.daemon.questions._LOOK_AGAIN", 0.0)
    await site.cut(call())
    assert site.asked("/slots") == 2


async def test_streams_and_embeddings_need_no_look(site: Site) -> None:
    stream = await site.cut(call(stream=True))
    embedding = await site.cut(call(EMBEDDINGS, input="a b"))
    assert (stream.completion, embedding.prompt, embedding.completion) == (0, 3, 0)
    assert site.asked("/slots") == 0


async def test_what_a_stream_told_before_its_client_left(site: Site) -> None:
    tally = Tally()
    tally.add_timings({"prompt_n": 5, "cache_n": 2, "predicted_n": 9, "predicted_ms": 8.5})
    used = await counting.settle_cut_short(site.server, call(stream=True), "m1", tally)
    assert used == Usage(7, 2, 9, "counted", None, 8.5)
    assert site.standin.requests == []


def slot(made: Any = 7, prompt: Any = 5, cached: Any = 1, **changes: Any) -> dict[str, Any]:
    """An entry of /slots."""
    return {
        "is_processing": True,
        "n_prompt_tokens_processed": prompt,
        "n_prompt_tokens_cache": cached,
        "params": {"stream": False},
        "next_token": [{"n_decoded": made}],
        **changes,
    }


@pytest.mark.parametrize(
    ("slots", "made"),
    [
        pytest.param([slot()], 7, id="its own"),
        pytest.param([slot(prompt=6)], 0, id="another's"),
        pytest.param([slot(9), slot(7), slot(8)], 7, id="the least of those that fit"),
        pytest.param([slot(params={"stream": True})], 0, id="a stream"),
        pytest.param([slot(is_processing=False)], 0, id="idle"),
        pytest.param([slot(next_token={"n_decoded": 3})], 3, id="an older build"),
        pytest.param([slot(prompt=None)], 7, id="no lengths told, the only one"),
        pytest.param([slot(prompt=None), slot(prompt=None)], 0, id="no lengths told, one of two"),
        pytest.param([slot(next_token=None), None, 5, {}], 0, id="strange ones"),
        pytest.param({"error": "off"}, 0, id="no list"),
        pytest.param([], 0, id="none"),
    ],
)
async def test_the_slot_of_a_plain_answer(site: Site, slots: Any, made: int) -> None:
    site.standin.on["/slots"] = Reply(body=slots)
    used = await site.cut(call(TEXT, prompt="a b c d e"))  # six tokens with the first one
    assert (used.prompt, used.completion) == (6, made)


async def test_the_choices_of_a_prompt_share_its_cached_part(site: Site) -> None:
    site.standin.on["/slots"] = Reply(body=[slot(7), slot(9)])
    used = await site.cut(call(TEXT, prompt="a b c d e", n=2))
    assert (used.cached, used.completion) == (1, 16)


async def test_a_server_that_tells_no_slots(site: Site) -> None:
    site.forget("/slots")
    assert (await site.cut(call(TEXT, prompt="a b"))) == Usage(3, 0, 0, "counted")


async def test_a_dead_server_is_estimated(site: Site) -> None:
    await site.standin.stop()
    assert (await site.cut(call(TEXT, prompt="one two three four"))) == Usage(4, 0, 0, "counted")


async def test_a_silent_server_is_not_waited_for(site: Site) -> None:
    site.standin.on.update(dict.fromkeys(["/slots", "/tokenize"], Reply(before=asyncio.Event())))
    began = time.monotonic()
    used = await site.cut(call(TEXT, prompt=["a b c d"] * 20), patience=0.2)
    assert used.prompt == 80
    assert time.monotonic() - began < 2
    questions = Questions(site.server, "m1", 0)
    assert await questions.tokens("a", special=True) is None
    assert questions.unanswered


SLOTS = st.lists(st.builds(Slot, st.integers(1, 4) | st.none(), st.integers(0, 3), st.integers(0, 50)), max_size=6)


@given(slots=SLOTS, prompts=st.lists(st.integers(1, 4), min_size=1, max_size=3), n=st.integers(1, 3))
def test_nobody_is_charged_more_than_fits(slots: list[Slot], prompts: list[int], n: int) -> None:
    cached, made = counting._made(slots, prompts, n)
    fitting = [slot for slot in slots if slot.prompt is None or slot.prompt in prompts]
    assert made <= sum(sorted(slot.made for slot in fitting)[-len(prompts) * n :] if prompts else [])
    assert cached <= sum(slot.cached for slot in fitting)
    if None not in {slot.prompt for slot in slots}:
        others = [Slot(9, 5, 99), *slots]
        assert counting._made(others, prompts, n) == (cached, made)
