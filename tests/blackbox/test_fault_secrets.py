"""Fault: somebody reads the log, the database, the errors or the list of processes: no key is to be found there.

Every kind of key is used in every way that there is, right and wrong, at the most talkative level of logging.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from smolproxy.standin import Reply, StandIn

from .harness import Answer, Daemon, until

ADMIN = "admin-canary-5dd1"
SERVER = "server-canary-a6c2"
SERVER_BY_STDIN = "server-canary-b7d3"
SERVER_BY_ADMIN = "server-canary-c8e4"
SERVER_WRONG = "server-canary-d9f5"
WRONG = "wrong-canary-e0a6"
CHAT = "/v1/chat/completions"


@contextmanager
def process_lists() -> Iterator[set[bytes]]:
    """Collect the command lines of all processes meanwhile."""
    seen: set[bytes] = set()
    ended = Event()

    def look() -> None:
        while not ended.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    seen.add((process / "cmdline").read_bytes())
                except OSError:
                    continue

    looking = Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()


async def everything(daemon: Daemon, server: StandIn, key: str, admin_key: str) -> list[Answer]:
    """Ask in every way; return all answers."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answers = []

    async def ask(method: str, path: str, **options: Any) -> None:
        answers.append(await daemon.ask(method, path, **options))

    for secret in (key, admin_key, WRONG, SERVER):
        carriers = (
            {"Authorization": f"Bearer {secret}"},
            {"Authorization": secret},
            {"Authorization": f"Basic {secret}"},
            {"x-api-key": secret},
            {"api-key": secret},
            {"Cookie": f"key={secret}"},
        )
        for headers in carriers:
            await ask("POST", CHAT, headers=headers, json=body)
            await ask("GET", "/admin/keys", headers=headers)
        await ask("POST", f"{CHAT}?api_key={secret}", key=secret, json={**body, "stream": True})
        await ask("GET", f"/nowhere?key={secret}", key=secret)
        await ask("GET", f"/v1/models?key={secret}", key=secret)
        await ask("PUT", CHAT, key=secret, json=body)
        await ask("POST", CHAT, key=secret, data=b"{" + secret.encode())
        await ask("POST", CHAT, key=secret, data=b"no gzip", headers={"Content-Encoding": "gzip"})
        await ask("POST", CHAT, key=secret, data=io.BytesIO(bytes(2_000_000)))
        await ask("GET", "/health", key=secret)
        for raw in (
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {secret}\r\n\r\n",
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\x01\r\n\r\n",
            f"{secret} nonsense\r\n\r\n",
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {secret * 2000}\r\n\r\n",
        ):
            answers.append(await daemon.raw(raw.encode()))
    for reply in (
        Reply(status=401),
        Reply(status=500),
        Reply(no_answer=True),
        Reply(body="<html>", headers={"Content-Type": "text/html"}),
        Reply(cut=1),
    ):
        for stream in (False, True):
            server.script.append(reply)
            await ask("POST", CHAT, key=key, json={**body, "stream": stream})
            await until(lambda: not server.script)
    for model in ("unreachable", "refusing", "by-stdin", "by-admin"):
        await ask("POST", CHAT, key=key, json={**body, "model": model})
    for path in ("keys", "servers", "aliases", "usage", "usage/summary/real"):
        await ask("GET", f"/admin/{path}", key=admin_key)
    wrong_fields = {"name": "x", "url": "no url", "api_key": SERVER_BY_ADMIN}
    await ask("POST", "/admin/servers", key=admin_key, json=wrong_fields)
    await ask("POST", "/admin/servers", key=admin_key, json={**wrong_fields, "url": f"http://user:{WRONG}@x"})
    await ask("PATCH", "/admin/servers/1", key=admin_key, json={"api_key": [SERVER_BY_ADMIN]})
    await ask("PATCH", "/admin/servers/1", key=admin_key, json={"key": SERVER_BY_ADMIN})
    return answers


async def test_no_key_is_in_log_database_errors_or_process_list(make_daemon: Callable[..., Daemon]) -> None:
    settings = {"log_level": "debug", "max_body_mib": 1, "probe_interval": 0.1}
    async with (
        StandIn(["m"], api_key=SERVER) as one,
        StandIn(["by-stdin"], api_key=SERVER_BY_STDIN) as two,
        StandIn(["by-admin"], api_key=SERVER_BY_ADMIN) as three,
        StandIn(["refusing"], api_key="another") as refusing,
    ):
        servers = [
            {"name": "one", "url": one.url, "api_key": SERVER, "models": ["m"]},
            {"name": "gone", "url": "http://127.0.0.1:1", "api_key": SERVER, "models": ["unreachable"]},
            {"name": "refusing", "url": refusing.url, "api_key": SERVER_WRONG, "models": ["refusing"]},
        ]
        daemon = make_daemon(config={"servers": servers}, settings=settings, env={"ADMIN_KEY": ADMIN})
        with process_lists() as processes:
            daemon.start()
            command = [sys.executable, "-m", "smolproxy", "--db", daemon.db, "servers", "add", "two", two.url]
            added = await asyncio.to_thread(
                subprocess.run,
                [*command, "--model", "by-stdin", "--api-key", "-"],
                env=daemon.env,
                input=f"{SERVER_BY_STDIN}\n",
                capture_output=True,
                text=True,
            )
            assert added.returncode == 0, added
            body = {"name": "three", "url": three.url, "api_key": SERVER_BY_ADMIN, "models": ["by-admin"]}
            assert (await daemon.ask("POST", "/admin/servers", key=ADMIN, json=body)).status == 200
            key = (await daemon.cli("keys", "create", "ann")).out.strip()
            rotated = (await daemon.cli("keys", "rotate", 1)).out.strip()
            commands = [
                await daemon.cli(*arguments, code=code)
                for arguments, code in (
                    (("keys", "list"), 0),
                    (("keys", "show", 1), 0),
                    (("servers", "list", "--json"), 0),
                    (("servers", "check"), 1),
                    (("usage", "--logs", "--json"), 0),
                )
            ]
            answers = await everything(daemon, one, rotated, ADMIN)
            assert {200, 400, 401, 403, 404, 405, 413, 500, 502} <= {answer.status for answer in answers}

            daemon.configure({"servers": [{"name": "one", "url": one.url, "api_key": [SERVER]}]})
            daemon.signal(signal.SIGHUP)
            await until(lambda: daemon.logged("config file not loaded"))
            commands.append(await daemon.cli("config", "check", code=1))
            whole = b"".join(path.read_bytes() for path in daemon.folder.glob("proxy.db*"))
            os.truncate(daemon.db, 0)
            answers += [
                await daemon.ask("GET", "/admin/keys", key=ADMIN),
                await daemon.ask("GET", "/v1/models", key=key),
            ]
            daemon.kill()
    servers_keys = (SERVER, SERVER_BY_STDIN, SERVER_BY_ADMIN, SERVER_WRONG)
    secrets = (key, rotated, ADMIN, WRONG, *servers_keys)
    assert all(len(secret) > 10 for secret in secrets)
    log = daemon.log_text()
    for secret in secrets:
        assert not [line for line in log.splitlines() if secret in line]
        for answer in answers:
            assert secret not in answer.text, answer
            assert secret not in str(answer.headers), answer
        for run in commands:
            assert secret not in run.out + run.err
        assert not any(secret.encode() in line for line in processes)
    assert any(b"--api-key" in line for line in processes)
    for secret in (key, rotated, ADMIN, WRONG):
        assert secret.encode() not in whole
    assert SERVER_BY_STDIN.encode() in whole  # a server's key is there: the daemon needs it
