"""One admitted request, from its admission to its usage row.

An :class:`Exchange` is settled exactly once, in :meth:`Exchange.settle`, however the request ends: answer, error,
timeout, client gone, shutdown. Nothing else writes a row or gives back a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import ClientResponse

from smolproxy.core.call import Call
from smolproxy.core.limiter import Reservation
from smolproxy.core.usage import Tally, Usage
from smolproxy.daemon.ledger import Ledger
from smolproxy.daemon.servers import Server
from smolproxy.store.keys import Key
from smolproxy.store.usage import UsageRow

NO_USAGE = Usage()


class Exchange:
    """What is known of one admitted request.

    :param request_id: as in the answer's header and the log.
    :param arrived: when the request came, of the clock of ``time.perf_counter`` (seconds).
    :param model: the model's real name.
    """

    __slots__ = (
        "_leased",
        "_ledger",
        "_reservation",
        "_task",
        "answer",
        "arrived",
        "call",
        "created_at",
        "first_token",
        "interrupted",
        "key",
        "log_when_settled",
        "model",
        "outcome",
        "peeked",
        "request_id",
        "sent",
        "server",
        "settled",
        "status",
        "tally",
        "usage",
    )

    def __init__(
        self,
        request_id: str,
        arrived: float,
        key: Key,
        call: Call,
        model: str,
        ledger: Ledger,
        reservation: Reservation,
    ) -> None:
        self.request_id = request_id
        self.arrived = arrived
        self.created_at = time.time_ns() // 1_000_000
        self.key = key
        self.call = call
        self.model = model
        self.server: Server | None = None
        self.first_token: float | None = None  # clock of time.perf_counter
        self.interrupted: str | None = None  # why the task was cancelled: "client" or "shutdown"
        self.answer: ClientResponse | None = None  # the server's
        self.sent = False  # a server may have worked on it
        self.tally: Callable[[], Tally] | None = None  # what the answer has told so far
        self.peeked = b""  # bytes of the answer's body that have been read already
        self.log_when_settled: Callable[[], None] | None = None  # writes the line of the access log
        self.settled = False
        self.status = 0  # HTTP status, when the answer to the client has begun
        self.outcome = ""
        self.usage = NO_USAGE
        self._ledger = ledger
        self._reservation = reservation
        self._leased = False
        self._task = asyncio.current_task()

    def lease(self, server: Server) -> None:
        """Take a place at a server."""
        self.server = server
        self.sent = True
        self._leased = True
        server.in_flight += 1

    def end_lease(self) -> None:
        """Give the place at the server back; it is free again at once, whatever else takes time."""
        if self._leased and self.server is not None:
            self._leased = False
            self.server.in_flight -= 1

    def not_sent(self) -> None:
        """End the attempt at a server that has not worked on the request."""
        self.end_lease()
        self.sent = False
        if self.answer is not None:
            self.answer.close()
            self.answer = None

    def give_back(self) -> None:
        """Give back all that the request holds, before its row is written."""
        self.end_lease()
        self._reservation.release()

    def close(self) -> None:
        """Let go of everything, at the very end.

        A connection whose answer was read to its end is back in the pool by now; any other is closed.
        """
        self.give_back()
        if self.answer is not None:
            self.answer.close()

    def refuse(self) -> None:
        """End the request as if it had not been admitted: it makes no row and uses none of the key's limits."""
        self.settled = True
        self._reservation.cancel()
        self.end_lease()

    def log_late(self) -> None:
        """Write the line of the access log, if it has waited for the row."""
        write, self.log_when_settled = self.log_when_settled, None
        if write is not None:
            write()

    def interrupt(self, reason: str) -> None:
        """End the request from outside: the client has gone, or the daemon stops."""
        if self.interrupted is None and self._task is not None:
            self.interrupted = reason
            self._task.cancel()

    def check_interrupted(self) -> None:
        """Raise the cancellation that ``asyncio.wait_for`` swallows when it comes at the same moment as a result.

        Before Python 3.12 it does so.
        """
        if self.interrupted is not None:
            raise asyncio.CancelledError

    def settle(self, status: int, outcome: str, usage: Usage = NO_USAGE) -> Awaitable[None]:
        """End the request: the lease and the reservation are given back, the row is on its way.

        :param status: HTTP status sent.
        :param outcome: as in the usage row.
        :return: done when the row is in the file, or waiting for that is no use.
        """
        assert not self.settled
        self.give_back()
        self.settled = True
        self.status, self.outcome, self.usage = status, outcome, usage
        now = time.perf_counter()
        self._reservation.settle(usage.prompt + usage.completion, time.time())
        first = self.first_token
        return self._ledger.put(
            UsageRow(
                self.created_at,
                self.request_id,
                self.key.id,
                None if self.server is None else self.server.record.id,
                self.call.model or self.model,
                self.model,
                self.call.endpoint.path,
                self.call.stream,
                status,
                outcome,
                usage.prompt,
                usage.cached,
                usage.completion,
                usage.source,
                usage.prompt_ms,
                usage.predicted_ms,
                None if first is None else round((first - self.arrived) * 1000, 3),
                round((now - self.arrived) * 1000, 3),
            )
        )
