"""`python -m smolproxy.standin` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

import pytest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(number: signal.Signals) -> None:
    options = ["--port", "0", "--model", "a", "--model", "b", "--slots", "3", "--no-embeddings", "--metrics"]
    command = [sys.executable, "-m", "smolproxy.standin", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split(" on ")[1].split(" ")[0]
            assert line == f"stand-in for llama-server on {url} with a, b\n"
            with urllib.request.urlopen(f"{url}/props", timeout=10) as answer:
                assert json.load(answer)["total_slots"] == 3
        finally:
            process.send_signal(number)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (0, "")
