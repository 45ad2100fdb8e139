"""Health: active probes of each server, and what the failures of requests teach.

A probe asks ``/health``; when a server comes up, and now and then after that, it is also asked for its models and
slots. A probe that gets no answer in time while requests run proves nothing: busy is not down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import structlog

from smolproxy.config import Settings
from smolproxy.core.names import told_model
from smolproxy.daemon.servers import Server

log = structlog.get_logger("smolproxy")

_ASK_AGAIN = 60.0  # seconds between questions for models and slots
_LOOK = 5.0  # seconds between looks whether it is time for that, where there are no probes
_ANSWERING = ("up", "busy")


def is_loading(status: int, answer: Any) -> bool:
    """Whether an answer is llama-server's way of saying that it still loads its model."""
    if status != 503 or type(answer) is not dict:
        return False
    error = answer.get("error")
    return type(error) is dict and "loading" in str(error.get("message", "")).lower()


class Health:
    """Watches servers.

    :param changed: called when the models of a server have changed.
    """

    def __init__(self, settings: Settings, changed: Callable[[], None]) -> None:
        self._settings = settings
        self._changed = changed
        self._up = asyncio.Event()

    async def watch(self, server: Server, known: Callable[[], bool]) -> None:
        """Probe a server for as long as it is ``known``; without probes it is only asked for models and slots."""
        interval = self._settings.probe_interval
        asked = float("-inf")
        while known():
            if server.record.active:
                came_up = False
                if interval:
                    was_up = server.state in _ANSWERING
                    await self.probe(server)
                    came_up = server.state in _ANSWERING and not was_up
                now = time.monotonic()
                due = now - asked >= _ASK_AGAIN and (not interval or server.state in _ANSWERING)
                if came_up or due or server.ask_again or server.state == "wrong_key":
                    server.ask_again = False
                    await self.discover(server)
                    asked = now
            await asyncio.sleep(interval or _LOOK)

    async def probe(self, server: Server) -> None:
        """Ask for the server's health once and note the answer."""
        try:
            status, answer = await server.ask("GET", "/health", self._settings.probe_timeout or 60.0)
        except asyncio.TimeoutError:
            if not server.in_flight:
                self.note(server, "down", f"no answer to /health within {self._settings.probe_timeout:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.note(server, "down", describe(error))
        else:
            if status == 200:
                if server.state != "wrong_key":  # /health is public, so it proves no key right
                    self.note(server, "up")
            elif is_loading(status, answer):
                self.note(server, "loading", "loading its model")
            else:
                self.note(server, "down", f"/health answered {status}")

    async def discover(self, server: Server) -> None:
        """Ask for the server's models and slots, and so whether its key is right."""
        try:
            status, answer = await server.ask("GET", "/v1/models", self._settings.probe_timeout or 60.0)
            if status in (401, 403):
                self.note(server, "wrong_key", f"/v1/models answered {status}: the server's key is wrong or missing")
                return
            if server.state == "wrong_key":
                self.note(server, "up")
            models = _model_names(answer) if status == 200 else None
            status, answer = await server.ask("GET", "/props", self._settings.probe_timeout or 60.0)
            slots = answer.get("total_slots") if status == 200 and type(answer) is dict else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            log.info("server did not tell its models", server=server.record.name, reason=describe(error))
            return
        if server.learn(models, slots if type(slots) is int and slots > 0 else None):
            log.info("models of a server changed", server=server.record.name, models=list(server.models))
            self._changed()

    def note(self, server: Server, state: str, error: str | None = None) -> None:
        """Note a state of a server; wakes those who wait for one to come up."""
        if server.set_state(state, error):
            level = log.warning if state in ("down", "wrong_key") else log.info
            level("server state", server=server.record.name, state=state, error=error)
        if state == "up":
            self._up.set()
            self._up = asyncio.Event()

    def answered(self, server: Server) -> None:
        """Take note that a server has answered a request: whatever was thought of it, it is up."""
        if server.state not in (*_ANSWERING, "disabled"):
            self.note(server, "up")
            server.ask_again = True

    async def wait_until_up(self, timeout: float) -> None:
        """Wait until some server is found up.

        :raises asyncio.TimeoutError: none was in ``timeout`` seconds.
        """
        await asyncio.wait_for(self._up.wait(), timeout)


def _model_names(answer: Any) -> list[str] | None:
    """Read the names out of an OpenAI list of models; ``None`` if it is none."""
    if type(answer) is not dict or type(answer.get("data")) is not list:
        return None
    named = (model.get("id") for model in answer["data"] if type(model) is dict)
    return [told_model(name) for name in named if type(name) is str]


def describe(error: BaseException) -> str:
    """Describe a failure for administrators, without a URL."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error.os_error}"
    if isinstance(error, asyncio.TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "ended its answer too early"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
