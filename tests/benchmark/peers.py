"""The programs that are measured side by side, each in front of the same stand-in server.

A peer that is not installed is named and left out. smol-llm-proxy and LiteLLM are looked for in environments of their
own: ``$SMOLPROXY_BENCHMARK/smol-llm-proxy`` and ``.../litellm`` (default ``~/.cache/smolproxy-benchmark``), made with
``python -m venv`` and ``pip install smol-llm-proxy==0.4.3`` or ``pip install 'litellm[proxy]'``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmark.processes import Process, free_port

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = Path(os.environ.get("SMOLPROXY_BENCHMARK", "~/.cache/smolproxy-benchmark")).expanduser()
MODEL = "bench"
_ADMIN = {"Authorization": "Bearer benchmark-admin"}


class Missing(Exception):
    """A peer that is not installed; the message says what to do."""


@dataclass
class Peer:
    """A running peer and the key that it takes."""

    name: str
    process: Process
    key: str


def _admin(port: int, method: str, path: str, body: object) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {**_ADMIN, "Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        result: dict[str, object] = json.load(answer)
        return result


def smolproxy(folder: Path, backend: str) -> Peer:
    """This program: every feature on, access log to a file."""
    port = free_port()
    environment = {
        "ADMIN_KEY": "benchmark-admin",
        "DB_PATH": str(folder / "smolproxy.db"),
        "PYTHONPATH": str(ROOT),
        "CONFIG_PATH": "",
    }
    command = [sys.executable, "-m", "smolproxy"]
    run = {"check": True, "env": {**os.environ, **environment}, "cwd": folder, "capture_output": True, "text": True}
    subprocess.run([*command, "servers", "add", "backend", backend, "--model", MODEL], **run)  # type: ignore[call-overload]
    key = subprocess.run([*command, "keys", "create", "bench"], **run).stdout.strip()  # type: ignore[call-overload]
    process = Process([*command, "serve", "--host", "127.0.0.1", "--port", str(port)], port, folder, environment)
    return Peer("smolproxy", process, key)


def bare(folder: Path, backend: str) -> Peer:
    """The least that aiohttp can do."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).parent / "bare.py"), str(port), backend]
    return Peer("bare aiohttp", Process(command, port, folder, {}), "-")


def nginx(folder: Path, backend: str) -> Peer:
    """nginx as a plain reverse proxy, with an access log."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise Missing("nginx: apt-get install nginx-light")
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"""worker_processes 1; daemon off; error_log {folder}/nginx.err; pid {folder}/nginx.pid;
events {{ worker_connections 2048; }}
http {{
  access_log {folder}/nginx.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream backend {{ server {backend.removeprefix("http://")}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
    )
    return Peer("nginx", Process([program, "-c", str(config)], port, folder, {}), "-")


def _script(name: str, package: str) -> str:
    program = ENVIRONMENTS / name / "bin" / name
    if not program.exists():
        raise Missing(f"{name}: python -m venv {ENVIRONMENTS / name}, then install {package} there")
    return str(program)


def smol_llm_proxy(folder: Path, backend: str) -> Peer:
    """smol-llm-proxy, one worker."""
    program = _script("smol-llm-proxy", "smol-llm-proxy==0.4.3")
    port = free_port()
    config = folder / "smol.yaml"
    config.write_text(f"servers:\n  - name: backend\n    url: {backend}\n    models: [{MODEL}]\n")
    environment = {
        "ADMIN_KEY": "benchmark-admin",
        "PROXY_HOST": "127.0.0.1",
        "PROXY_PORT": str(port),
        "DB_PATH": str(folder / "smol.db"),
        "CONFIG_PATH": str(config),
        "PROXY_MAX_CONNECTIONS": "512",
        "PROXY_MAX_KEEPALIVE": "512",
    }
    peer = Peer("smol-llm-proxy", Process([program], port, folder, environment), "")
    peer.process.wait_until_listening()
    made = _admin(port, "POST", "/admin/keys", {"name": "bench"})
    peer.key = str(made["key"])
    # its keys have limits unless told otherwise, which this load exceeds at once
    _admin(port, "PUT", f"/admin/keys/{made.get('id', 1)}/limits", {"rpm_limit": 10**9, "tpm_limit": 10**12})
    return peer


def litellm(folder: Path, backend: str) -> Peer:
    """LiteLLM's proxy, one worker, without a database."""
    program = _script("litellm", "'litellm[proxy]'")
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: {backend}/v1\n      api_key: none\n"
        "general_settings:\n  master_key: sk-benchmark\n"
        "litellm_settings:\n  telemetry: false\n"
    )
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    return Peer("LiteLLM", Process(command, port, folder, environment), "sk-benchmark")


PEERS: dict[str, Callable[[Path, str], Peer]] = {
    "nginx": nginx,
    "bare": bare,
    "smolproxy": smolproxy,
    "smol-llm-proxy": smol_llm_proxy,
    "litellm": litellm,
}
