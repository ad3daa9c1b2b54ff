"""A wire into a network namespace that has none: TCP on its loopback ↔ a Unix socket ↔ a server outside.

`relay.py in PORT PATH` inside the namespace, `relay.py out PORT PATH` outside. A node is cut off by taking
its loopback down; no server listens anywhere but on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def main(side: str, port: int, path: str) -> None:
    """Serve until killed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if side == "in":
                there = await asyncio.open_unix_connection(path)
            else:
                there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))

    if side == "in":
        server = await asyncio.start_server(serve, "127.0.0.1", port)
    else:
        server = await asyncio.start_unix_server(serve, path)
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
