"""Measure smolproxy and its peers side by side: ``python -m tests.benchmark``.

Starts a compiled stand-in for llama-server and each peer that is installed, drives one after the other with wrk,
several rounds, and prints medians and ratios of this one run. ``--write`` puts table and plot into the README. Needs
gcc and wrk; takes some four minutes, and ends by itself.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from tests.benchmark import plot
from tests.benchmark.peers import PEERS, Missing, Peer
from tests.benchmark.processes import Process, free_port
from tests.benchmark.scenes import SCENES, Round, Scene, measure, median, require_wrk

Results = dict[str, dict[str, list[Round]]]  # scene -> peer -> rounds


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description="Measure smolproxy and its peers.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--scenes", default=",".join(scene.name for scene in SCENES))
    parser.add_argument("--write", action="store_true", help="put table and plot into README.md and examples/")
    arguments = parser.parse_args()
    require_wrk()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("gcc is missing: apt-get install gcc")
    scenes = [scene for scene in SCENES if scene.name in arguments.scenes.split(",")]
    with tempfile.TemporaryDirectory(prefix="smolproxy-benchmark-") as name:
        folder = Path(name)
        backend = folder / "backend"
        source = Path(__file__).parent / "backend.c"
        subprocess.run([compiler, "-O2", "-o", str(backend), str(source)], check=True)
        results: Results = {}
        idle: dict[str, float] = {}
        for scene in scenes:
            results[scene.name] = _scene(scene, arguments.peers.split(","), arguments.rounds, backend, folder, idle)
    text = table(scenes, results, idle)
    print(text)
    if arguments.write:
        plot.write(scenes, results, text)
    return 0


def _scene(
    scene: Scene, names: list[str], rounds: int, backend: Path, folder: Path, idle: dict[str, float]
) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {}
    port = free_port()
    command = [str(backend), str(port), str(scene.delay), str(scene.events), "5"]
    with ExitStack() as running:
        server = running.enter_context(Process(command, port, folder, {}))
        server.wait_until_listening()
        peers: list[Peer] = []
        for name in names:
            own = folder / f"{scene.name}-{name}"
            own.mkdir()
            try:
                peer = PEERS[name](own, f"http://127.0.0.1:{port}")
            except Missing as missing:
                print(f"left out: {missing}", file=sys.stderr)
                continue
            running.enter_context(peer.process)
            peer.process.wait_until_listening()
            peers.append(peer)
            idle.setdefault(peer.name, peer.process.memory())
        for number in range(rounds):
            for peer in peers:
                measured = measure(peer, scene, folder)
                found.setdefault(peer.name, []).append(measured)
                print(f"{scene.name} {number + 1}/{rounds} {peer.name}: {measured}", file=sys.stderr)
    return found


def table(scenes: list[Scene], results: Results, idle: dict[str, float]) -> str:
    """Return the results as Markdown."""
    lines = []
    for scene in scenes:
        rounds = results[scene.name]
        ours = median(rounds["smolproxy"], lambda r: r.cpu) if "smolproxy" in rounds else float("nan")
        unit = "event" if scene.stream else "request"
        lines += [
            f"**{scene.title}**",
            "",
            f"| | CPU per {unit} | as a multiple of smolproxy's | mean | 99 % | memory |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, measured in rounds.items():
            cpu = median(measured, lambda r: r.cpu)
            failed = sum(r.failed for r in measured)
            lines.append(
                f"| {name}{f' ({failed} failed)' if failed else ''} | {cpu:.0f} us | {cpu / ours:.2f} "
                f"| {median(measured, lambda r: r.mean):.1f} ms | {median(measured, lambda r: r.p99):.1f} ms "
                f"| {median(measured, lambda r: r.memory):.0f} MB |"
            )
        lines.append("")
    lines.append("Memory idle: " + ", ".join(f"{name} {size:.0f} MB" for name, size in idle.items()) + ".")
    lines.append(
        f"Python {platform.python_version()}, aiohttp {version('aiohttp')}, {platform.machine()}, "
        f"{len(next(iter(next(iter(results.values())).values())))} rounds, medians."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
