"""One rank in a process of its own, told what to do on stdin, a JSON list a line; what it says comes on stdout so too.

usage: python -m tests.support.sglang_core.rank_process NAME ROLE DIRECTORY
"""

from __future__ import annotations

import json
import pathlib
import sys
import threading
from typing import Any

from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.types import Role, TransferId
from tests.support.sglang_core.cores import Rank, options


class Speaking(Rank):
    """Says at once what it hears."""

    def hear(self, *event: Any) -> None:
        super().hear(*event)
        say(*event)


def say(*event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main(name: str, role: str, directory: str) -> None:
    rank = Speaking(name, Role(role), options(pathlib.Path(directory)))
    rank.core.start()
    say("metadata", rank.core.export_metadata())
    for line in sys.stdin:
        what, *order = json.loads(line)
        if what == "add_remote_agent":
            rank.core.add_remote_agent(*order)
        elif what == "accept":
            rank.sources.accept(*order)
        elif what == "write":
            rank.write(rank.kv, *order)
        elif what == "reader":
            room, transfer_id, agent_id, pages = order
            rank.sources.reader(room, RoomReader(TransferId.from_hex(transfer_id), agent_id, 0, pages))
        elif what == "send":
            room, first, pages, is_last, is_fenced = order
            fence = threading.Event().wait if is_fenced else None
            rank.sources.send(room, first, pages, is_last=is_last, aux_row=0, fence=fence)
        elif what == "begin":
            room, transfer_id, source, pages = order
            rank.destinations.begin(room, TransferId.from_hex(transfer_id), [(source, 0)], pages, 0)
    rank.core.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
