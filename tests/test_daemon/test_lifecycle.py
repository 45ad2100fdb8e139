"""What of the daemon's life needs no process."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from smolproxy.daemon import lifecycle
from smolproxy.daemon.lifecycle import ListenError


def test_without_uvloop_the_standard_loop_is_used(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert lifecycle._loop_factory() is None


def test_connections_are_probed_so_that_a_vanished_client_is_noticed() -> None:
    listener = lifecycle._listen("127.0.0.1", 0)
    with listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        count = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert idle + interval * count <= 180
        assert listener.getblocking() is False


def test_what_cannot_be_listened_on_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1 port {port}"):
            lifecycle._listen("127.0.0.1", port)
    with pytest.raises(ListenError, match=r"no-such-host\.invalid"):
        lifecycle._listen("no-such-host.invalid", 0)


def test_ipv6_is_listened_on_too() -> None:
    try:
        with lifecycle._listen("::1", 0) as listener:
            assert listener.family == socket.AF_INET6
    except ListenError:
        pytest.skip("no IPv6 here")
