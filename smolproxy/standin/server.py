"""`StandIn`: the stand-in as tests hold it. Starts, stops, records, looks up the script and routes to what answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from . import shapes
from .answer import Answer
from .endpoints import GENERATING, Endpoints
from .engine import Counters, Engine
from .generate import EventWriter, Refused
from .reply import Gone, Reply
from .wire import Connection, Limits, Request


class StandIn:
    """A pretended llama-server on a port of 127.0.0.1, in the caller's event loop.

    Use as `async with StandIn() as server:`, or with `start` and `stop`. Times are in seconds.

    models         names in /v1/models; answers tell the first, whatever was asked, unless it has the one asked
    slots          requests worked on at a time; more wait, first come first served
    port           0 for any that is free; kept by later starts
    api_key        when set, everything but /health needs it
    n_ctx          tokens that prompt and answer may have together
    token_delay, prompt_delay, prompt_token_delay   for each token made, each prompt, each prompt token processed
    notice         after which a client that left is noticed while no token goes to it
    keep_alive, max_answers, keep_after_stream      when connections are closed
    dimensions     of embeddings; 0: they are refused, as by a server started without `--embeddings`
    metrics        whether there is a /metrics
    replay         answer a body seen before with the bytes of the first time: light enough for benchmarks
    keep_requests  False: `requests` stays empty
    """

    def __init__(
        self,
        models: Sequence[str] = ("m1",),
        slots: int = 4,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        n_ctx: int = 4096,
        token_delay: float = 0.0,
        prompt_delay: float = 0.0,
        prompt_token_delay: float = 0.0,
        notice: float = 1.0,
        keep_alive: float = 5.0,
        max_answers: int = 100,
        keep_after_stream: bool = False,
        dimensions: int = 8,
        metrics: bool = True,
        replay: bool = False,
        keep_requests: bool = True,
    ) -> None:
        self.models, self.host, self.port = list(models), host, port
        self.engine = Engine(slots, prompt_delay, prompt_token_delay, token_delay)
        self.limits = Limits(keep_alive, max_answers, keep_after_stream)
        self.keep_requests = keep_requests
        self.requests: list[Request] = []
        """All requests, in the order of their arrival."""
        self.script: list[Reply] = []
        """Replies of the next requests for chats, completions and embeddings, each used once."""
        self.default = Reply()
        """The reply of those for which the script has none."""
        self.on: dict[str, Reply] = {}
        """Replies by path, any path, as often as it is asked: `server.on["/health"] = Reply(status=500)`."""
        self.loading = False
        """As while the model loads: 503 everywhere."""
        self.in_flight = 0
        """Chats, completions and embeddings being answered, or waiting for a slot."""
        self.closed_early = 0
        """Requests whose client left before the whole answer was written."""
        self.connections: set[Connection] = set()
        self.connection_count = 0
        """Connections ever accepted."""
        self.faults: list[Exception] = []
        """Faults of the stand-in itself; leaving `async with` raises the first."""
        self._endpoints = Endpoints(self.engine, self.models, n_ctx, api_key, notice, metrics, replay, dimensions)
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://{self.host}:{self.port}"

    @property
    def counters(self) -> Counters:
        """What was really processed so far."""
        return self.engine.counters

    async def __aenter__(self) -> StandIn:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop()
        if self.faults and kind is None:
            raise self.faults[0]

    async def start(self) -> None:
        """Listen; again after `stop`, on the same port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self.host, self.port, reuse_address=True, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and all connections, as when the process dies. Script, counters and caches stay."""
        if self._server is None:
            return
        self._server.close()
        tasks = [connection.task for connection in self.connections]
        self.kill_connections()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def kill_connections(self) -> None:
        """Reset every open connection."""
        for connection in list(self.connections):
            connection.cut()

    async def wait_for(self, condition: Callable[[], object], timeout: float = 5.0) -> None:
        """Wait until the condition holds; TimeoutError if it does not within `timeout`."""
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout:g} s")
            await asyncio.sleep(0.002)

    # From connection to answer.

    def _accept(self) -> Connection:
        self.connection_count += 1
        connection = Connection(self.connection_count, self.limits, self._handle, self.connections.discard, self._left)
        self.connections.add(connection)
        return connection

    def _left(self, request: Request) -> None:
        self.closed_early += 1

    async def _handle(self, connection: Connection, request: Request) -> bool:
        if self.keep_requests:
            self.requests.append(request)
        generating = request.method == "POST" and request.path in GENERATING
        answer = Answer(connection, request, self._reply(request.path, generating))
        self.in_flight += generating
        try:
            await self._answer(request, answer)
        except Refused as refused:
            await answer.whole(refused.status, shapes.dumps(refused.body))
        except Gone:
            raise
        except Exception as fault:
            self.faults.append(fault)
            if answer.started:
                raise Gone from fault
            await answer.whole(500, shapes.dumps(shapes.error(500, repr(fault), "server_error")))
        finally:
            self.in_flight -= generating
        return not answer.closing

    def _reply(self, path: str, generating: bool) -> Reply:
        if path in self.on:
            return self.on[path]
        if not generating:
            return Reply()
        return self.script.pop(0) if self.script else self.default

    async def _answer(self, request: Request, answer: Answer) -> None:
        reply, connection = answer.reply, answer.connection
        if reply.before is not None:
            await connection.pause(reply.before)
        if reply.no_answer:
            connection.cut()
            raise Gone
        if self.loading:
            body = shapes.early_error(503, "Loading model", "unavailable_error")
            await answer.whole(503, shapes.dumps(body))
        elif reply.chunks is not None:
            answer.start(reply.status)
            writer = EventWriter(answer)
            for chunk in reply.chunks:
                await (writer.send(chunk) if isinstance(chunk, bytes) else writer.pause(chunk))
            await answer.finish()
        elif reply.body is not None:
            given = reply.body.encode() if isinstance(reply.body, str) else reply.body
            await answer.whole(reply.status, given if isinstance(given, bytes) else shapes.dumps(given))
        elif reply.status >= 400:
            raise Refused(reply.status, "scripted", "server_error")
        elif request.method == "OPTIONS":
            cors = {"Access-Control-Allow-Credentials": "true", "Access-Control-Allow-Headers": "*"}
            await answer.whole(200, b"", "text/html", cors)
        else:
            await self._endpoints.answer(request, answer)
