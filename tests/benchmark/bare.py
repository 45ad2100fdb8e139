"""The least that a proxy made of aiohttp can be: it forwards a chat and nothing more. ``bare.py PORT BACKEND_URL``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

SESSION = "session"


async def forward(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    session: aiohttp.ClientSession = request.app[SESSION]
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{sys.argv[2]}{request.path}", data=body, headers=headers) as answer:
        kept = {"Content-Type": answer.headers["Content-Type"]}
        if answer.content_type != "text/event-stream":
            return web.Response(body=await answer.read(), status=answer.status, headers=kept)
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        while data := await answer.content.readany():
            await response.write(data)
        await response.write_eof()
        return response


async def session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=None)
    app[SESSION] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
    yield
    await app[SESSION].close()


def main() -> None:
    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/chat/completions", forward)
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None, loop=new_event_loop())


if __name__ == "__main__":
    main()
