"""The pure core: bytes, values and a clock in, values out. No I/O, no asyncio, no aiohttp, no sqlite."""
