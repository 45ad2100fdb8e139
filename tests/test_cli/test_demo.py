"""`smolproxy demo` as a process: the lines it prints are tried, and nothing of it stays."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

DEMO = [sys.executable, "-m", "smolproxy", "demo"]


def ask(curl: str) -> str:
    """Do what a printed `curl` line would."""
    words = shlex.split(curl)
    url = next(word for word in words if word.startswith("http://"))
    name, _, value = words[words.index("-H") + 1].partition(": ")
    data = words[words.index("-d") + 1].encode() if "-d" in words else None
    with urllib.request.urlopen(urllib.request.Request(url, data, {name: value}), timeout=30) as answer:
        return answer.read().decode()


def test_the_printed_lines_work_and_nothing_stays():
    with subprocess.Popen(
        [*DEMO, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            lines = []
            while "Ctrl-C" not in (line := process.stdout.readline()):
                assert line, "it ended"
                lines.append(line.strip())
            chat, usage, admin = [line for line in lines if line.startswith(("curl ", sys.executable))]
            assert "-N" in shlex.split(chat)
            stream = ask(chat)
            assert stream.endswith("data: [DONE]\n\n")
            assert stream.count("data: ") > 40
            assert [server["state"] for server in json.loads(ask(admin))] == ["up"]
            words = shlex.split(usage)
            folder = Path(words[words.index("--db") + 1]).parent
            assert folder.exists()
            report = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=30, check=True)
            (row,) = json.loads(report.stdout)["summary"]
            assert row["request_count"] == 1
            assert row["total_completion_tokens"] > 40
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert not folder.exists()


def test_a_port_in_use_is_told_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*DEMO, "--port", port], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: cannot listen on 127.0.0.1 port {port}: Address already in use; try `--port 0`\n"
