"""A target in a process of its own: says where its memory is, then does nothing but what it is told on stdin.

usage: python -m tests.support.nixl.target_process NAME LENGTH_BYTES SEED

It never touches NIXL's calls while peers read and write. One JSON object a line each way.
"""

from __future__ import annotations

import base64
import json
import sys

from kvxfer.connectors.nixl import nixl_agent
from tests.support.nixl.agents import memory, register, row


def main(name: str, length: int, seed: int) -> None:
    agent = nixl_agent(name)
    mine = memory(length, seed)
    registered = register(agent, mine)
    while True:
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        print(json.dumps({"metadata": metadata, "address": row(mine)[0], "sum": int(mine.sum())}), flush=True)
        order = sys.stdin.readline().strip()
        if order == "register again":
            agent.deregister_memory(registered)
            registered = register(agent, mine)
        elif order == "notifications":
            told = {key: [text.decode() for text in texts] for key, texts in agent.get_new_notifs().items()}
            print(json.dumps(told), flush=True)
        elif not order:
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
