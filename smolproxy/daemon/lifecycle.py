"""The daemon's life: listen, signals, reload, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

import structlog
from aiohttp import web

from smolproxy import __version__, logs
from smolproxy.config import FileConfig, ServeOptions, load
from smolproxy.daemon.app import Daemon, create_app
from smolproxy.daemon.merge import merge
from smolproxy.daemon.protocol import Protocol
from smolproxy.errors import ConfigError, Conflict, Invalid, SmolproxyError

log = structlog.get_logger("smolproxy")

# A client whose host has vanished without a word is let go after some two minutes.
_KEEP_ALIVE_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
_BACKLOG = 1024
_LAST_WORDS = 1.0  # seconds that connections get to send what is left when all requests have ended


class ListenError(SmolproxyError):
    """The address cannot be listened on."""


def run(options: ServeOptions) -> int:
    """Run the daemon until it is told to stop; returns the exit status.

    :raises SmolproxyError: it cannot start; the message says why.
    """
    config = _load(options)
    logs.configure(config.settings.log_level, config.settings.log_format)
    factory = _loop_factory()
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(serve(options, config))
    if factory is not None:  # Python 3.10 has no Runner
        import uvloop

        uvloop.install()
    return asyncio.run(serve(options, config))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes an event loop of uvloop, if that is installed (extra ``speed``)."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    return factory


async def serve(options: ServeOptions, config: FileConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 1 if usage rows could not be written."""
    stop, again = asyncio.Event(), asyncio.Event()
    _signals(stop, again)
    listener = _listen(options.host, options.port)
    daemon = await Daemon.open(options, config)
    try:
        await _merge(daemon, config)
    except BaseException:
        await daemon.close()
        raise
    runner = web.AppRunner(create_app(daemon), access_log=None, handle_signals=False)
    try:
        await runner.setup()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: daemon.watching.start(_reload(daemon), "reload"))
        # Not through a site of aiohttp: before 3.9 stopping one ends the running requests.
        accepting = await loop.create_server(
            lambda: Protocol(_server(runner), daemon.proxy.client_gone), sock=listener, backlog=_BACKLOG
        )
        host, port = listener.getsockname()[:2]
        log.info("listening", version=__version__, host=host, port=port, pid=os.getpid(), db=str(options.db))
        await stop.wait()
        log.info("stopping", open_requests=len(daemon.proxy.exchanges))
        accepting.close()
        draining = asyncio.ensure_future(_drain(daemon, config.settings.drain_timeout))
        hurrying = asyncio.ensure_future(again.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if again.is_set():
            await _end_at_once(daemon)
        hurrying.cancel()
        await draining
        await _server(runner).shutdown(_LAST_WORDS)
    finally:
        await runner.cleanup()
    log.info("stopped")
    return 1 if daemon.unwritten else 0


def _server(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None  # from set-up to clean-up there is one
    return runner.server


def _signals(stop: asyncio.Event, again: asyncio.Event) -> None:
    """Take over the signals: SIGTERM or SIGINT sets ``stop``, a second one ``again``, a third one ends the process."""
    loop = asyncio.get_running_loop()

    def stopping() -> None:
        if again.is_set():
            os._exit(1)
        (again if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # while the daemon starts, there is nothing to load anew


async def _end_at_once(daemon: Daemon) -> NoReturn:
    """End the process without waiting for anybody but the database: what is open gets its row."""
    log.warning("stopping at once", open_requests=len(daemon.proxy.exchanges))
    daemon.proxy.settle_all()
    await daemon.ledger.flush(_LAST_WORDS)
    os._exit(1)


def _load(options: ServeOptions) -> FileConfig:
    if options.config is None or not (options.config_required or options.config.exists()):
        return FileConfig()
    return load(options.config)


async def _merge(daemon: Daemon, config: FileConfig) -> None:
    try:
        merged = await merge(daemon.database, config)
    except (Conflict, Invalid) as error:
        raise Invalid(f"{config.path}: {error}") from error
    for change in merged.changes:
        log.info("config", change=change)
    for warning in merged.warnings:
        log.warning("config", warning=warning)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE_PROBES:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _reload(daemon: Daemon) -> None:
    try:
        config = _load(daemon.options)
        await _merge(daemon, config)
        await daemon.directory.refresh()
    except ConfigError as error:
        for problem in error.problems:
            log.error("config file not loaded", problem=str(problem))
        return
    except SmolproxyError as error:
        log.error("config file not loaded", problem=str(error))
        return
    if config.settings != daemon.config.settings:
        log.warning("changed settings are in force after a restart; servers and aliases are in force now")
    log.info("no config file to load" if config.path is None else "config file loaded")


async def _drain(daemon: Daemon, timeout: float) -> None:
    """Let open requests finish; what is left after ``timeout`` seconds is told so and ended."""
    proxy = daemon.proxy
    proxy.stopping = True
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while proxy.exchanges and loop.time() < end:
        await asyncio.sleep(0.05)
    for exchange in list(proxy.exchanges.values()):
        exchange.interrupt("shutdown")
    end = loop.time() + 5.0
    while proxy.exchanges and loop.time() < end:
        await asyncio.sleep(0.02)
