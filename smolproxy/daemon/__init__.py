"""The running daemon: aiohttp and asyncio around the pure core and the store."""
