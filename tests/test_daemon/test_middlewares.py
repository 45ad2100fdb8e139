"""The envelope around everything: faults, aiohttp's own errors, clients that have gone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import structlog
from aiohttp import ClientConnectionError, web
from aiohttp.test_utils import TestClient, TestServer

from smolproxy.daemon.middlewares import outermost
from smolproxy.errors import ApiError, Conflict, DatabaseError

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[TestClient]]]:
    """Serve one handler under / behind the middleware."""
    clients: list[TestClient] = []

    async def start(handler: Handler) -> TestClient:
        application = web.Application(middlewares=[outermost(access_log=True, max_body_mib=64)])
        application.router.add_get("/", handler)
        client = TestClient(TestServer(application))
        clients.append(client)
        await client.start_server()
        return client

    yield start
    for client in clients:
        await client.close()


def raising(error: BaseException) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    return handler


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError("model_not_found", "no such model", param="model"), 404, "model_not_found"),
        (Conflict("taken"), 409, "conflict"),
        (DatabaseError("cannot be read"), 503, "database_unavailable"),
        (web.HTTPNotFound(), 404, "not_found"),
        (web.HTTPMethodNotAllowed("GET", ["POST", "PUT"]), 405, "method_not_allowed"),
        (web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2), 413, "body_too_large"),
        (web.HTTPExpectationFailed(), 400, "invalid_request"),
        (web.HTTPServiceUnavailable(), 500, "internal_error"),
    ],
)
async def test_errors_become_the_envelope(serve, error: Exception, status: int, code: str) -> None:
    client = await serve(raising(error))
    async with client.get("/") as response:
        assert response.status == status
        assert response.headers["x-request-id"]
        answer = (await response.json())["error"]
    assert answer["code"] == code
    assert set(answer) == {"message", "type", "code", "param"}


async def test_a_fault_tells_no_traceback_but_the_request_id(serve) -> None:
    client = await serve(raising(ZeroDivisionError("a-secret")))
    with structlog.testing.capture_logs() as logs:
        async with client.get("/", headers={"Accept": "text/html"}) as response:
            assert response.status == 500
            request_id = response.headers["x-request-id"]
            text = await response.text()
    assert json.loads(text)["error"]["code"] == "internal_error"
    assert request_id in text
    assert "a-secret" not in text
    assert "Traceback" not in text
    (fault,) = [record for record in logs if record["event"] == "internal error"]
    assert fault["request_id"] == request_id
    assert fault["exc_info"]
    (access,) = [record for record in logs if record["event"] == "request"]
    assert (access["status"], access["request_id"]) == (500, request_id)


async def test_for_a_client_that_has_gone_there_is_only_a_line_in_the_log(serve) -> None:
    client = await serve(raising(ConnectionResetError("gone")))
    with structlog.testing.capture_logs() as logs, pytest.raises((ClientConnectionError, AssertionError)):
        async with client.get("/") as response:
            assert response.status == 0  # an aiohttp that answers something itself
    assert [record["status"] for record in logs if record["event"] == "request"] == [499]
    assert not [record for record in logs if record["event"] == "internal error"]


async def test_other_spellings_keep_query_and_handler(serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"x": request.query["x"]})

    client = await serve(handler)
    async with client.get("//?x=a%20b") as response:
        assert (await response.json())["x"] == "a b"
