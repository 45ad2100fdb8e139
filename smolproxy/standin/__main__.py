"""The stand-in as a command, `python -m smolproxy.standin`: prints a line when it listens, ends on SIGINT, SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

from .server import StandIn


def parser() -> argparse.ArgumentParser:
    """The command's options; their defaults are llama-server's where it has them."""
    options = argparse.ArgumentParser("python -m smolproxy.standin", description="A stand-in for llama-server.")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8080, help="0 for any that is free (default 8080)")
    options.add_argument("--model", dest="models", action="append", metavar="NAME", help="may be repeated (default m1)")
    options.add_argument("--slots", type=int, default=4, help="requests worked on at a time (default 4)")
    options.add_argument("--api-key", help="needed for everything but /health")
    options.add_argument("--n-ctx", type=int, default=4096, help="context of a slot in tokens (default 4096)")
    options.add_argument("--token-delay", type=float, default=0.0, metavar="S", help="seconds before each token")
    options.add_argument("--prompt-delay", type=float, default=0.0, metavar="S", help="seconds before the first token")
    options.add_argument("--prompt-token-delay", type=float, default=0.0, metavar="S", help="the same per prompt token")
    options.add_argument(
        "--keep-alive", type=float, default=5.0, metavar="S", help="closes idle connections (default 5)"
    )
    options.add_argument("--max-answers", type=int, default=100, help="answers per connection (default 100)")
    options.add_argument("--keep-after-stream", action="store_true", help="keep the connection after a stream")
    options.add_argument("--no-embeddings", dest="dimensions", action="store_const", const=0, default=8)
    options.add_argument("--metrics", action="store_true", help="serve /metrics")
    options.add_argument("--replay", action="store_true", help="answer a body seen before with the same bytes, cheaply")
    return options


async def run(options: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    settings = vars(options)
    settings["models"] = settings["models"] or ["m1"]
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with StandIn(keep_requests=False, **settings) as server:
        print(f"stand-in for llama-server on {server.url} with {', '.join(server.models)}", flush=True)
        await ended.wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser().parse_args()))
