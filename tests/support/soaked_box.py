"""What the faults of benchmarks/soak.py do to hosts in its box, as one JSON line. A program that enters the box;
it needs `benchmarks` in PYTHONPATH."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from soaking.box import Box, Host, enter
from soaking.faults import relayed
from soaking.plan import PlannedFault

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
"""
ASK = """
import socket, sys, time
address, size, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
began_s = time.monotonic()
try:
    with socket.create_connection((address, 7), timeout=patience_s) as connection:
        connection.sendall(bytes(size))
        while size > 0:
            size -= len(connection.recv(65536))
    print(time.monotonic() - began_s)
except TimeoutError:
    print("silent")
"""
PATIENCE_S = 10.0
SHORT_S = 0.4


def asked(source: Host | None, target: Host, size: int = 1, patience_s: float = PATIENCE_S) -> float | str:
    """Seconds until ``size`` bytes came back to ``source`` (None: the program's own host), or "silent"."""
    command = [sys.executable, "-I", "-S", "-c", ASK, target.address, str(size), str(patience_s)]
    words = [*(source.command() if source else ()), *command]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return said if said == "silent" else float(said)


async def look(one: Host, two: Host) -> dict[str, Any]:
    found: dict[str, Any] = {"well": asked(one, two)}
    await two.unplug()
    found["unplugged"] = [asked(one, two, patience_s=SHORT_S), asked(None, two, patience_s=SHORT_S)]
    await two.plug()
    found["plugged"] = asked(one, two)
    await one.part_from(two)
    found["parted"] = [asked(one, two, patience_s=SHORT_S), asked(None, two)]
    await one.join(two)
    found["joined"] = asked(one, two)
    await two.limit(2.0)
    found["limited"] = asked(one, two, size=200_000)
    await two.unlimit()
    found["unlimited"] = asked(one, two, size=200_000)
    for kind, amount, patience_s in (("delay", 60.0, PATIENCE_S), ("loss", 1.0, SHORT_S)):
        async with relayed(two, PlannedFault(0.0, 1.0, kind, "two", amount=amount)):
            found[kind] = await asyncio.to_thread(asked, one, two, 30_000, patience_s)
    found["unrelayed"] = asked(one, two)
    return found


def written(host: Host) -> int | str:
    try:
        return (host.disk / "more").write_bytes(b"x")
    except OSError as error:
        return error.strerror


def main() -> None:
    enter(__file__, [])
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Box(pathlib.Path(folder))) as box:
        one, two = box.add("one", 4), box.add("two", 4)
        echo = [*two.command(), sys.executable, "-I", "-S", "-c", ECHO, two.address]
        with subprocess.Popen(echo, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            serving.stdout.readline()
            found = asyncio.run(look(one, two))
            serving.kill()
        two.fill()
        found["full"] = written(two)
        two.empty()
        found["emptied"] = written(two)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
