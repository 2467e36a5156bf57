"""The processes that serve, as the parent has them: started by exec, watched, and started again when they end.

Decides when a process is started again and when it is killed. It must never know what it serves.

A process is started by `subprocess`, which neither runs Python nor takes locks between its fork and its exec, and gets
exactly three descriptors: its end of the channel, the listening socket, the shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from kvxfer import observe
from kvxfer.errors import KvxferError
from kvxfer.policy.backoff import Backoff
from kvxfer.router.group.channel import Channel, Message

log = logging.getLogger("kvxfer.router")

RESTART = Backoff(base_s=0.1, cap_s=5.0, jitter=0.2)
SETTLED_S = 10.0
"""A process that served for so long is started again at once."""


class MemberProcess:
    """One process, from its start to its end. ``on_message`` is called with each message of it."""

    def __init__(self, row: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.row = row
        self.channel = channel
        self.began_s = time.monotonic()
        self.silent_s = 0.0
        """How long the parent has waited for a word of it, of the time in which the parent itself ran."""
        self._process = process
        self.is_serving = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        if not self.ended.is_set():
            self._process.send_signal(signal.SIGKILL)

    async def wait(self, on_message: Callable[[MemberProcess, Message], None]) -> int:
        """Its exit code, once it is gone; its messages go to ``on_message`` until then."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        descriptor = os.pidfd_open(self._process.pid)
        loop.add_reader(descriptor, gone.set)
        reading = asyncio.create_task(self._read(on_message))
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if not gone.is_set():
                reading.cancel()
        code = self._process.wait()
        await asyncio.wait([reading], timeout=1.0)  # what it said last
        reading.cancel()
        self.channel.close()
        self.ended.set()
        return code

    async def _read(self, on_message: Callable[[MemberProcess, Message], None]) -> None:
        while (message := await self.channel.receive()) is not None:
            self.silent_s = 0.0
            try:
                on_message(self, message)
            except Exception:
                log.exception("a message of another process of this router broke")


async def start(row: int, inherited: Sequence[int]) -> MemberProcess:
    """A process for that row. Raises KvxferError where none can be started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    level, style = observe.configured()
    with theirs:
        descriptors = (theirs.fileno(), *inherited)
        command = [
            *(sys.executable, "-m", "kvxfer.cli", "router"),
            f"--member={','.join(map(str, (*descriptors, row)))}",
            f"--exit-with-parent={os.getpid()}",
            f"--log-level={level}",
            f"--log-style={style}",
        ]
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns once the program is loaded, in a millisecond
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is the parent's, which tells its children
            )
        except OSError as error:
            ours.close()
            raise KvxferError(f"a process of the router cannot be started: {error.strerror}") from None
    return MemberProcess(row, process, await Channel.over(ours))
