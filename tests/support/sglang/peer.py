"""One role in a process of its own, to be killed: commands are JSON lines on stdin, answers on stdout.

usage: python -m tests.support.sglang.peer prefill|decode PORT MODEL

It says "imported" when it can be commanded. Commands: {"op": "begin", "room": 0} makes its rank, and for prefill the
bootstrap server at PORT; {"op": "open", "room"} makes a sender or receiver; {"op": "give", "room", "pages", "row"};
{"op": "start", "room", "pages", "row"}; {"op": "send", "room", "pages"}; {"op": "poll", "room"} answers its status;
{"op": "end", "room": 0} has its scheduler's loop end by an exception. The others answer null.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def main(role: str, port: int, model: str) -> None:
    from sglang.srt.plugins import load_plugins

    from tests.support.sglang.ranks import World, give, send, start

    load_plugins()
    import kvxfer.connectors.sglang.adapter_0_5_23  # noqa: F401  (it takes seconds)

    world = World(pathlib.Path(model), port=port, serves=role == "prefill")
    rank: Any = None
    sides: dict[int, Any] = {}
    print(json.dumps("imported"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        op, room = command["op"], command["room"]
        answer = None
        if op == "begin":
            world.__enter__()
            rank = world.prefill if role == "prefill" else world.decode
        elif op == "open":
            sides[room] = rank.sender(room) if role == "prefill" else rank.receiver(room)
            if role == "decode":
                rank.greet(sides[room])
        elif op == "give":
            give(sides[room], command["pages"], command["row"])
        elif op == "start":
            start(sides[room], command["pages"], command["row"])
        elif op == "send":
            send(sides[room], command["pages"])
        elif op == "end":
            from sglang.srt.managers.scheduler import Scheduler

            with contextlib.suppress(AttributeError):
                Scheduler.run_event_loop(object())
        else:
            answer = sides[room].poll()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
