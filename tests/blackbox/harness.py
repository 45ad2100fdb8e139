"""A real `smolproxy serve` in a process of its own, and what tests do with one.

Owns the process, its folder and its log. Knows nothing of what is right: that is for the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

import smolproxy
from smolproxy.standin import StandIn

ADMIN_KEY = "admin-key-of-the-tests"
STARTS_WITHIN = 30.0  # seconds; generous, for busy machines
_VARIABLES = ("ADMIN_KEY", "PROXY_HOST", "PROXY_PORT", "DB_PATH", "CONFIG_PATH", "PYTHONASYNCIODEBUG")


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def code(self) -> str:
        """The code of smolproxy's error envelope, whose shape is checked."""
        assert self.headers["Content-Type"].startswith("application/json"), self
        assert set(self.json) == {"error"}, self
        error = self.json["error"]
        assert set(error) == {"message", "type", "code", "param"}, self
        assert error["message"], self
        assert error["type"], self
        assert "://" not in error["message"], self
        return error["code"]

    @property
    def message(self) -> str:
        """The message of smolproxy's error envelope."""
        assert self.code
        return self.json["error"]["message"]


@dataclass
class Run:
    """A command that has ended."""

    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this one's without what commands read, and the package in reach."""
    env = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    root = str(Path(smolproxy.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return {**env, **(extra or {})}


class Daemon:
    """`smolproxy serve` with a database in a folder of its own.

    folder     working folder of the process and of commands
    config     content of config.yaml: servers, aliases, settings
    env        variables; ADMIN_KEY is there unless it is None here
    arguments  of `serve`, beside host and port
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.db = folder / "proxy.db"
        self.log_file = folder / "log"
        self.arguments = list(arguments)
        given = {"ADMIN_KEY": ADMIN_KEY, "DB_PATH": str(self.db), **(env or {})}
        self.env = environment({name: value for name, value in given.items() if value is not None})
        self.port: int | None = 0
        """Where it listens. 0 before it starts: any that is free; None: what the environment says."""
        self.process: subprocess.Popen[bytes] | None = None
        if config is not None:
            self.configure(config)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(dict(config), allow_unicode=True))

    # The process.

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process; the log goes on where an earlier one ended."""
        command = [sys.executable, "-m", "smolproxy", "serve", "--host", "127.0.0.1"]
        if self.port is not None:
            command += ["--port", str(self.port)]
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], cwd=self.folder, env=self.env, stdout=log, stderr=log
            )
        return self.process

    def start(self) -> Daemon:
        """Start the process and wait until it listens."""
        process = self.spawn()
        end = time.monotonic() + STARTS_WITHIN
        while not (found := self.logged("listening", since=self._log_start)):
            assert process.poll() is None, self.log_text()
            assert time.monotonic() < end, self.log_text()
            time.sleep(0.01)
        self.port = found[0]["port"]
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, timeout: float = 20.0) -> int:
        """Wait for the end of the process; return its exit status."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout)

    def stop(self) -> int:
        """End the process with SIGTERM, with SIGKILL if it does not; return its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
        try:
            return process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        """End the process with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    # The log.

    def log_text(self) -> str:
        """All that the process wrote."""
        return self.log_file.read_text(errors="replace")

    def logged(self, event: str, since: int = 0, **fields: Any) -> list[dict[str, Any]]:
        """The log's records of an event that have the given fields; from a byte position on."""
        with self.log_file.open("rb") as log:
            log.seek(since)
            lines = log.read().decode(errors="replace").splitlines()
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record["event"] == event and all(record.get(name) == value for name, value in fields.items()):
                    records.append(record)
        return records

    # Commands.

    async def cli(self, *arguments: Any, code: int = 0) -> Run:
        """Run a command on the same database; its exit status must be `code`."""
        command = [sys.executable, "-m", "smolproxy", "--db", str(self.db), *map(str, arguments)]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=self.folder, env=self.env, capture_output=True, encoding="utf-8", timeout=30
        )
        run = Run(done.returncode, done.stdout, done.stderr)
        assert run.code == code, run
        return run

    # The database file, as another program sees it.

    def rows(
        self, sql: str = "SELECT * FROM usage ORDER BY id", parameters: Sequence[Any] = ()
    ) -> list[dict[str, Any]]:
        """Rows of a query."""
        with contextlib.closing(sqlite3.connect(f"{self.db.as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(sql, parameters)]

    def rows_of(self, request_id: str) -> list[dict[str, Any]]:
        """Usage rows of a request."""
        return self.rows("SELECT * FROM usage WHERE request_id = ?", [request_id])

    def row(self, request_id: str) -> dict[str, Any]:
        """The one usage row of a request."""
        found = self.rows_of(request_id)
        assert len(found) == 1, found
        return found[0]

    # HTTP.

    def url(self, path: str) -> URL:
        """The URL of a path, which goes out as it is spelled here."""
        return URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, path: str, *, key: str | None = None, headers: Any = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask; the answer's head is there, its body is to be read. Leaving closes the connection."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            sent = [*bearer(key).items(), *dict(headers or {}).items()]
            options = {"allow_redirects": False, "headers": sent, **options}
            async with session.request(method, self.url(path), **options) as response:
                yield response

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Ask and read the whole answer."""
        async with self.open(method, path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def admin(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Ask as admin; the answer must have the status. Return its JSON."""
        answer = await self.ask(method, f"/admin{path}", key=ADMIN_KEY, **({} if body is None else {"json": body}))
        assert answer.status == status, answer
        return answer.json

    async def new_key(self, name: str = "ann", **limits: Any) -> str:
        """Make a key with limits; return it."""
        made = await self.admin("POST", "/keys", {"name": name})
        if limits:
            await self.admin("PUT", f"/keys/{made['id']}/limits", limits)
        return made["key"]

    async def add_server(self, server: StandIn, name: str | None = None, **fields: Any) -> int:
        """Add a stand-in under its model names; return its id."""
        body = {"name": name or f"s{server.port}", "url": server.url, "models": server.models, **fields}
        return (await self.admin("POST", "/servers", body))["id"]

    async def raw(self, data: bytes, *, end: bool = False) -> Answer:
        """Send bytes, and the end of them if `end`; return the answer, whose length must be told."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode().split("\r\n")
            headers = CIMultiDictProxy(CIMultiDict(line.split(": ", 1) for line in head[1:] if line))
            body = await asyncio.wait_for(reader.readexactly(int(headers["Content-Length"])), 20)
            return Answer(int(head[0].split(" ")[1]), headers, body)
        finally:
            writer.close()


async def until(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    """Wait until the condition holds; return what it said."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {timeout:g} s"
        await asyncio.sleep(0.005)
    return found
