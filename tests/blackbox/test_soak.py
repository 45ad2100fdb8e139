"""A long soak: after 20,000 requests and 5,000 disconnects the daemon is as it was before."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .clients import MIB, Client, descriptors, idle, memory
from .harness import Daemon, bearer, environment, until

REQUESTS, DISCONNECTS = 20_000, 5_000
WORKERS = 24

# Tells on SIGUSR1 which tasks there are.
TASKS = """
import asyncio, json, os, signal

def tell(*_):
    tasks = sorted(task.get_name().partition("-")[0] + " " + task.get_coro().__qualname__
                   for task in asyncio.all_tasks(asyncio.get_running_loop()))
    with open("tasks.new", "w") as file:
        json.dump(tasks, file)
    os.rename("tasks.new", "tasks.json")

signal.signal(signal.SIGUSR1, tell)
"""


@pytest.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a stand-in in a process of its own."""
    command = [sys.executable, "-m", "smolproxy.standin", "--port", "0", "--slots", "64", "--token-delay", "0.001"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment())
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().split(" on ")[1].split()[0]
    finally:
        process.terminate()
        await process.wait()


async def tasks(daemon: Daemon) -> Counter[str]:
    """The tasks in the daemon."""
    told = daemon.folder / "tasks.json"
    told.unlink(missing_ok=True)
    daemon.signal(signal.SIGUSR1)
    await until(told.exists)
    return Counter(json.loads(told.read_text()))


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_soak(tmp_path: Path, stand_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TASKS)
    daemon = Daemon(folder, config={"settings": {}})
    daemon.env["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "site"), daemon.env["PYTHONPATH"]))
    daemon.start()
    assert daemon.process is not None
    pid = daemon.process.pid
    figures: list[dict[str, Any]] = []
    try:
        server = {"name": "server", "url": stand_in, "models": ["m1"]}
        await daemon.admin("POST", "/servers", server)
        key = await daemon.new_key()
        asked = left = 0

        async def rest() -> dict[str, Any]:
            """What the daemon uses when nothing is going on."""
            await idle(daemon, 60)
            count = "SELECT count(*) AS n FROM usage"
            await until(lambda: daemon.rows(count)[0]["n"] == asked + left, 60)
            await asyncio.sleep(6)  # connections to the server have been let go
            return {
                "requests": asked,
                "disconnects": left,
                "memory": memory(pid),
                "descriptors": Counter(descriptors(pid)),
                "tasks": await tasks(daemon),
            }

        async def some(requests: int, disconnects: int) -> None:
            nonlocal asked, left
            work = [True] * requests + [False] * disconnects
            random.Random(asked).shuffle(work)
            queue = iter(work)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

                async def worker() -> None:
                    nonlocal asked, left
                    for whole in queue:
                        body = {"model": "m1", "messages": [], "max_tokens": 4, "stream": random.random() < 0.5}
                        if whole:
                            asked += 1
                            async with session.post(
                                daemon.url("/v1/chat/completions"), json=body, headers=bearer(key)
                            ) as response:
                                assert response.status == 200
                                await response.read()
                        else:
                            client = await Client(daemon.port).send({**body, "max_tokens": 3000}, key)
                            if body["stream"]:
                                await client.until(b"tok0")
                            await asyncio.sleep(random.uniform(0.02, 0.2))
                            left += 1
                            client.leave(reset=random.random() < 0.5)

                await asyncio.gather(*(worker() for _ in range(WORKERS)))

        await some(1000, 250)
        figures.append(await rest())
        started = time.monotonic()
        for _ in range(4):
            await some(REQUESTS // 4, DISCONNECTS // 4)
            figures.append(await rest())
        seconds = time.monotonic() - started
        outcomes = daemon.rows("SELECT outcome, count(*) AS n FROM usage GROUP BY outcome")
        with capsys.disabled():
            print(f"\n{REQUESTS} requests and {DISCONNECTS} disconnects in {seconds:.0f} s: {outcomes}")
            for each in figures:
                print({**each, "memory": f"{each['memory'] / MIB:.1f} MiB"})
        first, last = figures[0], figures[-1]
        assert last["memory"] - figures[1]["memory"] < 6 * MIB
        assert sum(last["descriptors"].values()) <= sum(first["descriptors"].values()) + 1
        assert sum(last["tasks"].values()) <= sum(first["tasks"].values())
        assert {row["outcome"] for row in outcomes} == {"ok", "client_disconnect"}
        assert daemon.stop() == 0
        log = daemon.log_text()
        assert not [word for word in ("Traceback", "never retrieved", "was destroyed", "task failed") if word in log]
    finally:
        if daemon.process is not None:
            daemon.kill()
