"""Fixtures of the black-box tests: one daemon for a module, or one of a test's own; a stand-in with a key to it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smolproxy.standin import StandIn
from smolproxy.standin.endpoints import GENERATING

from .harness import Answer, Daemon

QUICK = {"loading_timeout": 1, "probe_interval": 0.2, "drain_timeout": 10}
"""Settings that keep tests short."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A running daemon that the tests of a module share; its settings are the module's SETTINGS."""
    settings = {**QUICK, **getattr(request.module, "SETTINGS", {})}
    shared = Daemon(tmp_path_factory.mktemp("daemon"), config={"settings": settings})
    try:
        yield shared.start()
        assert shared.stop() == 0, shared.log_text()
        assert not shared.logged("task failed"), shared.log_text()
        assert "Traceback" not in shared.log_text()
    finally:
        if shared.process is not None:
            shared.kill()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Make a daemon of the test's own, not started yet; it is ended after the test."""
    made: list[Daemon] = []

    def make(*, settings: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **options: Any) -> Daemon:
        folder = tmp_path / f"daemon{len(made)}"
        folder.mkdir()
        whole = {**(config or {}), "settings": {**QUICK, **(settings or {})}}
        made.append(Daemon(folder, config=whole, **options))
        return made[-1]

    yield make
    for each in made:
        if each.process is not None:
            each.stop()


@dataclass
class Site:
    """A stand-in that a daemon has as a server under a model name of its own, and a user's key."""

    daemon: Daemon
    server: StandIn
    model: str
    key: str
    server_id: int

    def body(self, **fields: Any) -> dict[str, Any]:
        """A chat for the model."""
        return {"model": self.model, "messages": [{"role": "user", "content": "tell me a story"}], **fields}

    async def chat(self, *, headers: Any = None, **fields: Any) -> Answer:
        """Ask for a chat."""
        return await self.daemon.ask(
            "POST", "/v1/chat/completions", key=self.key, json=self.body(**fields), headers=headers
        )

    def open(self, *, headers: Any = None, **fields: Any) -> Any:
        """Ask for a chat, of which only the head has come."""
        body = self.body(**{"stream": True, **fields})
        return self.daemon.open("POST", "/v1/chat/completions", key=self.key, json=body, headers=headers)

    def generating(self) -> list[Any]:
        """Requests that reached the server, but for smolproxy's own questions."""
        return [request for request in self.server.requests if request.method == "POST" and request.path in GENERATING]


@pytest.fixture
async def site(daemon: Daemon) -> AsyncIterator[Site]:
    """A stand-in at the module's daemon."""
    number = next(_numbers)
    async with StandIn([f"model-{number}"], notice=0.1) as server:
        server_id = await daemon.add_server(server, f"server-{number}")
        key = await daemon.new_key(f"user-{number}")
        yield Site(daemon, server, f"model-{number}", key, server_id)
        await daemon.admin("DELETE", f"/servers/{server_id}")
