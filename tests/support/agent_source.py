"""A source agent in a process of its own, told what to do on stdin, one JSON line each way.

usage: python -m tests.support.agent_source COORDINATOR TOKEN_FILE
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvxfer import Agent, TransferId
from kvxfer.rpc import load_token
from kvxfer.transport.base import allocate_region
from tests.support.agents import BLOCK_BYTES, RECORD, info


async def main(coordinator: str, token_file: str) -> None:
    loop = asyncio.get_running_loop()
    async with Agent(info("p"), coordinator=coordinator, token=load_token(token_file)) as agent:
        pool = agent.allocate_pool(RECORD, block_count=16, block_bytes=BLOCK_BYTES)
        for block in range(16):
            pool.array[block] = block + 1
        print(json.dumps({"ready": str(agent.ref)}), flush=True)
        grants = {}
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            if "register" in order:
                registration = agent.register(allocate_region(order["register"]))
                registration.region.owner[:] = order["fill"]
                print(registration.record.to_json(), flush=True)
                continue
            transfer_id = TransferId.from_hex(order["transfer_id"])
            await agent.wait_member("d", timeout_s=20)
            if transfer_id not in grants:
                grants[transfer_id] = agent.grant(pool, order["blocks"], transfer_id=transfer_id, reader="d")
            grants[transfer_id].ready(order["ready"], complete=order["ready"] == len(order["blocks"]))
            print(json.dumps({"state": grants[transfer_id].state.name}), flush=True)
            if order.get("wait"):
                print(json.dumps({"state": (await grants[transfer_id].wait_ended()).name}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
