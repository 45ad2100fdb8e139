"""Clients whose host is gone without a word, no FIN and no reset: TCP keep-alive finds out."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smolproxy.standin import Reply, StandIn

from .clients import Client, booked, idle
from .conftest import Site
from .harness import Daemon, until

HOST, GUEST = "198.18.7.1", "198.18.7.2"  # of the range for tests between networks

SCALED = """
import socket
from smolproxy.daemon import lifecycle
assert dict(lifecycle._KEEP_ALIVE_PROBES)[socket.TCP_KEEPIDLE] == 60
lifecycle._KEEP_ALIVE_PROBES = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2))
from smolproxy.cli.main import cli
cli()
"""

GUEST_CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(sys.stdin.buffer.read())
data = b""
while b"one" not in data:
    data += connection.recv(65536)
sys.stdout.buffer.write(data)
sys.stdout.buffer.flush()
time.sleep(60)
"""


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss (iproute2)")
async def test_keep_alive_is_on(site: Site) -> None:
    """While a stream is silent, the kernel has a keep-alive timer on the client's connection."""
    site.server.script.append(Reply(chunks=[b": hello\n\n", asyncio.Event()]))
    client = await Client(site.daemon.port).send(site.body(stream=True), site.key)
    await client.until(b"hello")
    port = client.sock.getsockname()[1]
    command = ["ss", "-tnoH", "state", "established", f"sport = :{site.daemon.port} and dport = :{port}"]

    def timer() -> re.Match[str] | None:
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return re.search(r"timer:\(keepalive,(?:(\d+)min)?(?:([\d.]+)(?:sec|ms))?", shown)

    found = await until(timer)
    assert int(found[1] or 0) * 60 + float(found[2] or 0) <= 60
    client.leave()
    await idle(site.daemon)


@pytest.fixture
def guest(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a network namespace with one cable to this one."""
    name, cable = f"smol{os.getpid()}", f"sm{os.getpid()}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {cable}a type veth peer name {cable}b netns {name}",
        f"ip addr add {HOST}/30 dev {cable}a",
        f"ip link set {cable}a up",
        f"ip -n {name} addr add {GUEST}/30 dev {cable}b",
        f"ip -n {name} link set {cable}b up",
    ]
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    try:
        for command in commands:
            if subprocess.run(command.split(), check=False, capture_output=True).returncode:
                pytest.skip(f"not permitted: {command}")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", f"{cable}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Scaled(Daemon):
    """A daemon with keep-alive probes each second, to be reached from everywhere."""

    def spawn(self) -> Any:
        path = self.folder / "serve.py"
        path.write_text(SCALED)
        self._log_start = 0
        command = [sys.executable, str(path), "serve", "--host", "0.0.0.0", "--port", "0"]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log)
        return self.process


async def test_a_host_is_gone(guest: str, tmp_path: Path) -> None:
    """The cable is cut while a stream is silent: the server is let go, the row is written."""
    daemon = Scaled(tmp_path, config={"settings": {"drain_timeout": 5}}).start()
    try:
        async with StandIn(notice=0.1) as server:
            await daemon.add_server(server)
            key = await daemon.new_key()
            token = b'data: {"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}\n\n'
            server.script.append(Reply(chunks=[token, asyncio.Event()]))
            body = b'{"model":"m1","messages":[],"stream":true}'
            request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % key.encode()
            request += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            inside = ["ip", "netns", "exec", guest]
            client = await asyncio.create_subprocess_exec(
                *inside,
                *(sys.executable, "-c", GUEST_CLIENT, HOST, str(daemon.port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert client.stdin is not None
                assert client.stdout is not None
                client.stdin.write(request)
                client.stdin.close()
                seen = b""
                while b"one" not in seen:
                    data = await asyncio.wait_for(client.stdout.read(65536), 10)
                    assert data
                    seen += data
                head = seen.decode().lower()
                request_id = head.split("x-request-id: ")[1].split("\r\n")[0]
                await asyncio.to_thread(
                    subprocess.run, [*inside, "ip", "link", "set", f"sm{os.getpid()}b", "down"], check=True
                )
                await until(lambda: server.in_flight == 0, 15)  # 1 s of silence, 2 probes a second apart
                row = await booked(daemon, request_id)
                assert (row["outcome"], row["status"], row["completion_tokens"]) == ("client_disconnect", 200, 1)
                await idle(daemon)
            finally:
                client.kill()
                await client.wait()
        assert daemon.stop() == 0
    finally:
        if daemon.process is not None:
            daemon.kill()
