"""The scenes: what is asked, how often, and how one round of it is measured with wrk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.peers import MODEL, Peer

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True)
class Scene:
    """One kind of load.

    :param delay: milliseconds until a plain answer.
    :param events: events of a stream, 0 for plain answers.
    :param per: how many things to divide the CPU time by, for each request.
    """

    name: str
    title: str
    connections: int
    seconds: int
    delay: int = 0
    events: int = 0

    @property
    def stream(self) -> bool:
        """Whether streams are asked for."""
        return self.events > 0


SCENES = (
    Scene("immediate", "immediate answers, 16 connections", 16, 4),
    Scene("delayed", "answers after 100 ms, 100 users", 100, 4, delay=100),
    Scene("streams", "64 streams of 200 events, 5 ms apart", 64, 5, events=200),
    Scene("single", "immediate answers, one connection", 1, 3),
)


@dataclass(frozen=True)
class Round:
    """What one round showed.

    :param cpu: microseconds of CPU for each request, or each event of a stream.
    :param mean: mean latency of a request, milliseconds.
    :param memory: MB at the end of the round.
    """

    cpu: float
    mean: float
    p50: float
    p99: float
    rate: float
    memory: float
    failed: int


def require_wrk() -> str:
    """Return the load generator.

    :raises SystemExit: it is not installed.
    """
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("wrk is missing: apt-get install wrk")
    return program


def measure(peer: Peer, scene: Scene, folder: Path) -> Round:
    """Load a peer with a scene once, for ``scene.seconds``.

    :raises RuntimeError: no request was answered.
    """
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Say good morning to the people in this room, please, and be brief about it."},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 256, "temperature": 0.7, "stream": scene.stream}
    script = folder / "post.lua"
    script.write_text(
        "wrk.method = 'POST'\n"
        f"wrk.body = [[{json.dumps(body)}]]\n"
        "wrk.headers['Content-Type'] = 'application/json'\n"
        f"wrk.headers['Authorization'] = 'Bearer {peer.key}'\n"
    )
    command = [require_wrk(), "-t1", f"-c{scene.connections}", f"-d{scene.seconds}", "--latency", "--timeout", "20s"]
    url = f"http://127.0.0.1:{peer.process.port}/v1/chat/completions"
    before = peer.process.cpu()
    done = subprocess.run(
        [*command, "-s", str(script), url], capture_output=True, text=True, timeout=scene.seconds + 60, check=True
    )
    cpu = peer.process.cpu() - before
    text = done.stdout
    requests = int(_find(r"(\d+) requests in", text))
    if not requests:
        raise RuntimeError(f"{peer.name} answered nothing: {text}")
    things = requests * (scene.events or 1)
    failures = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return Round(
        cpu=cpu / things * 1e6,
        mean=_time(r"Latency\s+([\d.]+)(us|ms|s|m)", text),
        p50=_time(r"50%\s+([\d.]+)(us|ms|s|m)", text),
        p99=_time(r"99%\s+([\d.]+)(us|ms|s|m)", text),
        rate=float(_find(r"Requests/sec:\s+([\d.]+)", text)),
        memory=peer.process.memory(),
        failed=int(failures[1]) if failures else 0,
    )


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk said something else: {text}")
    return match[1]


def _time(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"wrk said something else: {text}")
    return float(match[1]) * _UNITS[match[2]]


def median(rounds: list[Round], value: Callable[[Round], float]) -> float:
    """Return the median of a value over rounds."""
    ordered = sorted(map(value, rounds))
    return ordered[len(ordered) // 2]
