"""``smolproxy demo``: the real daemon in front of an embedded stand-in, with a temporary database and a fresh key.

Nothing of it outlives the command, and nothing outside is read: no configuration, no environment, no network.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from smolproxy.cli import output
from smolproxy.cli.environment import Environment
from smolproxy.errors import Invalid

_HOST = "127.0.0.1"
_MODEL = "demo-model"
_ANSWER = (
    "Hello! There is no language model behind these words: a stand-in for llama-server speaks them, one token after "
    "another. But all between you and it is real: your key was checked, the request went to the server that has the "
    "model, and what it cost is in the books. Ask `smolproxy usage`."
)
_TOKEN_DELAY = 0.04  # seconds: the speed of a brisk reader


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Listen port; 0 for any free one."
)
@click.pass_context
def demo(ctx: click.Context, port: int) -> None:
    """Try smolproxy without a model and without configuration.

    Runs the daemon on 127.0.0.1 in front of a stand-in for llama-server, with a temporary database, until Ctrl-C.
    """
    port = _free_port(port)
    with tempfile.TemporaryDirectory(prefix="smolproxy-demo-") as folder, _stand_in() as server_url:
        db = Path(folder) / "proxy.db"
        key, admin_key = _fill(db, server_url), secrets.token_hex(24)
        with _said_when_listening(port, _words(db, port, key, admin_key)):
            status = _serve(db, port, admin_key)
    ctx.exit(status)


def _words(db: Path, port: int, key: str, admin_key: str) -> list[str]:
    """What to try, each command on a line of its own."""
    url = f"http://{_HOST}:{port}"
    body = {"model": _MODEL, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    chat = ["curl", "-N", f"{url}/v1/chat/completions", "-H", f"Authorization: Bearer {key}", "-d", json.dumps(body)]
    usage = [*_program(), "--db", str(db), "usage"]
    admin = ["curl", f"{url}/admin/servers", "-H", f"Authorization: Bearer {admin_key}"]
    return [
        f"smolproxy listens on {url}. Stream an answer through it, from another terminal:",
        "",
        shlex.join(chat),
        "",
        "Then see it in the books:",
        "",
        shlex.join(usage),
        "",
        "What an admin sees:",
        "",
        shlex.join(admin),
        "",
        "Ctrl-C ends it; nothing stays.",
    ]


def _program() -> list[str]:
    """The words that run this program again from any folder."""
    program = Path(sys.argv[0])
    if program.name != "smolproxy":
        return [sys.executable, "-m", "smolproxy"]
    found = shutil.which("smolproxy")
    return ["smolproxy"] if found and Path(found).samefile(program) else [str(program.absolute())]


@contextmanager
def _said_when_listening(port: int, lines: list[str]) -> Iterator[None]:
    """Print the lines as soon as the port is listened on; not at all if the block ends before."""
    ended = threading.Event()

    def wait() -> None:
        while not ended.wait(0.05):
            with suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
                for line in lines:
                    output.say(line)
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _stand_in() -> Iterator[str]:
    """A stand-in for llama-server in a thread of its own; yields its URL, ends it with the block."""
    from smolproxy.standin import Reply, StandIn
    from smolproxy.standin.engine import tokenize

    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        ended = asyncio.Event()
        async with StandIn([_MODEL], token_delay=_TOKEN_DELAY, keep_requests=False) as server:
            server.default = Reply(says=[str(token) for token in tokenize(_ANSWER)])
            ready.set_result((server.url, asyncio.get_running_loop(), ended))
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url, loop, ended = ready.result(timeout=30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def _serve(db: Path, port: int, admin_key: str) -> int:
    from smolproxy.config import ServeOptions
    from smolproxy.daemon import lifecycle

    try:
        return lifecycle.run(ServeOptions(host=_HOST, port=port, db=db, admin_key=admin_key))
    finally:  # from here on it is only cleaned up: who is asked to end again need not leave that half done
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _free_port(port: int) -> int:
    """The port itself, or a free one for 0; an error if it is taken, before anything is started.

    :raises Invalid: the port cannot be listened on.
    """
    # Not one that the system gives to clients: asking such a port whether it is listened on may connect to itself.
    candidates = [port] if port else random.sample(range(20_000, 30_000), 100)
    for candidate in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, candidate))
            except OSError as error:
                reason = error.strerror
            else:
                return candidate
    raise Invalid(f"cannot listen on {_HOST} port {port}: {reason}; try `--port 0`")


def _fill(db: Path, server_url: str) -> str:
    """Make the database with the stand-in as its server; returns the key of its one user."""
    from smolproxy.store import keys, servers
    from smolproxy.store.database import Database

    async def work(database: Database) -> str:
        await servers.add(database, "stand-in", server_url, models=[_MODEL])
        return (await keys.create(database, "demo"))[1]

    return Environment(str(db)).run(work)
