"""Background tasks are kept, watched and awaited."""

from __future__ import annotations

import asyncio

import structlog

from smolproxy.daemon.tasks import Tasks


async def test_a_task_that_fails_is_told_in_the_log() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    tasks = Tasks()
    with structlog.testing.capture_logs() as logs:
        await asyncio.wait([tasks.start(fail(), "the task")])
    (record,) = logs
    assert (record["event"], record["task"]) == ("task failed", "the task")
    assert isinstance(record["exc_info"], ZeroDivisionError)
    assert len(tasks) == 0


async def test_draining_waits_and_then_cancels() -> None:
    tasks = Tasks()
    gate = asyncio.Event()
    quick = tasks.start(gate.wait(), "quick")
    stuck = tasks.start(asyncio.Event().wait(), "stuck")
    assert len(tasks) == 2
    gate.set()
    await tasks.drain(timeout=0.05)
    assert quick.done()
    assert not quick.cancelled()
    assert stuck.cancelled()
    assert len(tasks) == 0


async def test_draining_nothing_takes_no_time() -> None:
    await asyncio.wait_for(Tasks().drain(timeout=60), 1)
