"""Fault: the daemon is killed with SIGKILL under load, twenty times at a random moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .harness import Daemon
from .load import Load, chat, ids, loaded, standin_process

KILLS = 20


async def test_every_answer_that_had_ended_has_its_row(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(settings={"access_log": False})
    chance = random.Random(9)
    total = 0
    with standin_process() as url:
        key = await loaded(daemon, url)
        for _ in range(KILLS):
            load = Load()
            requests = [chat(key, daemon.port), chat(key, daemon.port, stream=True)]
            loading = asyncio.create_task(load.hammer(daemon.port, *requests, lines=16))
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            process = daemon.process
            assert process is not None
            process.kill()  # answers that are on their way still come
            await loading
            daemon.kill()
            booked = ids(daemon)
            assert len(booked) == len(set(booked))
            assert not load.others
            lost = set(load.ended) - set(booked)
            # the one exception: the disk was so slow that answers no longer waited for it
            assert not lost or daemon.logged("usage rows wait in memory: the database cannot be written")
            total += len(load.ended)
            daemon.start()
        assert total > 10 * KILLS
        assert daemon.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
        summed = daemon.rows("SELECT sum(request_count) AS n FROM usage_daily")[0]["n"]
        assert summed == len(ids(daemon))
