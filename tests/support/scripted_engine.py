"""An engine of exact bytes: every connection to it runs one script."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedEngine:
    def __init__(self) -> None:
        self.address = ""
        self.requests: list[tuple[bytes, bytes]] = []
        """(head, body) in the order of their arrival."""
        self.connections = 0
        self.open = 0
        self.errors: list[BaseException] = []
        self.hung_up = asyncio.Event()
        """A script saw the end of its connection."""

    async def read(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """One whole request."""
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", head)
        body = await reader.readexactly(int(found[1])) if found else b""
        self.requests.append((head, body))
        return head, body

    def answering(self, *answers: bytes, closes: bool = False) -> Script:
        """The answers to one request after the other, then those again; ``closes`` the connection after each."""

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                for answer in answers:
                    await self.read(reader)
                    writer.write(answer)
                    await writer.drain()
                    if closes:
                        return

        return script

    async def until_hung_up(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        self.hung_up.set()


@contextlib.asynccontextmanager
async def scripted_engine(make: Callable[[ScriptedEngine], Script]) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    script = make(engine)
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        engine.connections += 1
        engine.open += 1
        try:
            await script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            engine.errors.append(error)
        finally:
            engine.open -= 1
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
    host, port = server.sockets[0].getsockname()[:2]
    engine.address = f"{host}:{port}"
    try:
        yield engine
    finally:
        server.close()
        for task in tuple(running):
            task.cancel()
        await asyncio.gather(*running)
        await server.wait_closed()
    assert not engine.errors, engine.errors
