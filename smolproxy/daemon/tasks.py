"""Background tasks: started here and nowhere else, so that each is kept, watched and awaited at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger("smolproxy")


class Tasks:
    """Keeps references to running tasks and logs the ones that fail."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task failed", task=task.get_name(), exc_info=error)

    async def drain(self, timeout: float) -> None:
        """Wait until none is left, for ``timeout`` seconds at most; then cancel the rest."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel what is left, and wait for it."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
