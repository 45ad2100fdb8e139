"""Fault: the daemon is told to end under load. What else a signal does is told in test_life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .harness import Daemon
from .load import Load, chat, ids, loaded, standin_process


async def test_sigterm_under_load_loses_no_row(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"access_log": False})
    total = 0
    with standin_process("--token-delay", "0.01") as url:
        key = await loaded(daemon, url)
        for _ in range(2):
            load = Load()
            assert daemon.port
            requests = [chat(key, daemon.port), chat(key, daemon.port, stream=True, tokens=20)]
            loading = asyncio.create_task(load.hammer(daemon.port, *requests, lines=16))
            while len(load.ended) < 40:
                await asyncio.sleep(0.01)
            assert daemon.process is not None
            daemon.process.terminate()
            await loading
            told = time.monotonic()
            assert await daemon.ended() == 0
            print(f"{len(load.ended)} answers, ended after {time.monotonic() - told:.2f} s")
            # whoever was being served was served to the end; connections that were kept got 503, or were closed
            assert {status for status, _ in load.others} <= {503}
            booked = [row for row in daemon.rows() if row["request_id"] in set(load.ended)]
            assert len(booked) == len(load.ended)
            assert {row["outcome"] for row in booked} == {"ok"}
            total += len(load.ended)
            assert len(ids(daemon)) == total
            daemon.start()
        assert not daemon.logged("usage row not written")
