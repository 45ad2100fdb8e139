"""Processes of a benchmark: started, watched for CPU and memory, ended by their own process id."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A child process with a port, ended with the block.

    :param command: the program and its arguments.
    :param port: where it will listen.
    """

    def __init__(self, command: Sequence[str], port: int, folder: Path, environment: dict[str, str]) -> None:
        self.port = port
        self._log = (folder / f"{port}.log").open("wb")
        self._child = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def wait_until_listening(self, seconds: float = 60) -> None:
        """Wait for the port.

        :raises RuntimeError: it ended, or did not listen in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._child.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"did not listen on port {self.port}: see {self._log.name}")

    def _tree(self) -> list[int]:
        found = [self._child.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def cpu(self) -> float:
        """CPU time of the process and its children so far, seconds."""
        total = 0
        for pid in self._tree():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICK

    def memory(self) -> float:
        """Proportional set size of the process and its children, MB."""
        total = 0
        for pid in self._tree():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        return total / 1000


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
