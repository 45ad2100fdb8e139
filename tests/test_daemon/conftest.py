"""The daemon's application in the test's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from smolproxy.config import FileConfig, ServeOptions
from smolproxy.daemon.app import Daemon, create_app
from smolproxy.settings import Settings

ADMIN_KEY = "the-admin-key"


@pytest.fixture
async def run_app(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[Daemon, TestClient]]]]:
    """Run the application with some settings; return its daemon and a client."""
    clients: list[TestClient] = []

    async def run(*, admin_api: bool = True, **settings: Any) -> tuple[Daemon, TestClient]:
        options = ServeOptions(
            host="127.0.0.1",
            port=0,
            db=tmp_path / "proxy.db",
            config=None,
            config_required=False,
            admin_key=ADMIN_KEY if admin_api else None,
            admin_api=admin_api,
        )
        daemon = await Daemon.open(options, FileConfig(settings=Settings(**settings)))
        client = TestClient(TestServer(create_app(daemon)))
        clients.append(client)
        await client.start_server()
        return daemon, client

    yield run
    for client in clients:
        await client.close()
