"""A scriptable stand-in for llama-server with its real shapes: for the demo, tests and benchmarks.

Also a command: `python -m smolproxy.standin --port 9001 --model m1`. Rests on nothing but the standard library and
nothing else of the package.

    server     StandIn: start, stop, script, record      reply      what a script can say
    wire       connections and requests                  answer     head, body and end of an answer
    endpoints  the paths                                 generate   one chat or completion, told as llama-server does
    engine     tokens, slots, caches, counters           shapes     the JSON
    tape       answers replayed
"""

from .engine import Counters
from .reply import KEEP, MISSING, Reply
from .server import StandIn
from .wire import Request

__all__ = ["KEEP", "MISSING", "Counters", "Reply", "Request", "StandIn"]
