"""Makes docs/router-ui.png: the operators' page over a made-up fleet with ten minutes behind it.

usage: python -m tests.support.ui_screenshot FILE [light|dark]
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
import sys
import tempfile

import uvicorn

from kvxfer.openai.transfer_params import Part
from kvxfer.policy.admit import AdmitOptions
from kvxfer.policy.place import Placement, PlaceReason
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.front import Door, Front
from kvxfer.router.history import SPAN_S
from kvxfer.router.metrics import RequestOutcome, RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.record import RequestRecord
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.server import listening
from kvxfer.types import Load, Member, Membership, Role
from tests.support.browser import browsing
from tests.support.fake_workers import FakeWorker, Quiet

MODEL = "llama-3.1-8b"
LANES = {"a": "cma", "b": "ucx"}
SIZE = (1280, 1000)


def fleet(draw: random.Random) -> list[Member]:
    """Three prefill and four decode workers on two hosts, with some load."""
    made = []
    for role, names in ((Role.PREFILL, "a0 a1 b0"), (Role.DECODE, "a0 a1 b0 b1")):
        for name in names.split():
            host = name[0]
            fake = FakeWorker(f"{role.value}-{name}", role, model=MODEL, host_id=host).has_blocks(8192)
            fake.port = 8000 + len(made)
            waiting = draw.randrange(3) if role is Role.PREFILL else 0
            load = Load(waiting, draw.randrange(2, 24), waiting * 1900, draw.randrange(400, 6000), 8192)
            made.append((fake.member, load))
    return [dataclasses.replace(member, load=load) for member, load in made]


def live(core: RouterCore, members: list[Member], moment: list[float], draw: random.Random) -> None:
    """Ten minutes of requests, with a busy time in the middle and a worker that fails near the end."""
    prefillers = [member for member in members if member.info.role is Role.PREFILL]
    decoders = [member for member in members if member.info.role is Role.DECODE]
    begun_s = moment[0]
    while moment[0] < begun_s + SPAN_S:
        share = (moment[0] - begun_s) / SPAN_S
        busy = 1.0 + 2.0 * max(0.0, 1.0 - abs(share - 0.55) / 0.15)
        moment[0] += draw.expovariate(8.0 * busy)
        p, d = draw.choice(prefillers), draw.choice(decoders)
        goes_alone = draw.random() < 0.06
        reason = PlaceReason.NOT_WANTED if goes_alone else PlaceReason.REMOTE
        record = RequestRecord("/v1/chat/completions", "r", moment[0], MODEL, draw.random() < 0.8)
        record.placement = Placement(None if goes_alone else p, d, reason)
        record.attempts = 1
        first_s = draw.lognormvariate(-1.6, 0.35) * busy**0.7
        outcome = RequestOutcome.OK
        if 0.9 < share < 0.94 and d.ref.agent_id == "decode-b1":
            record.attempts, record.code, outcome = 3, "peer_gone", RequestOutcome.FAILED
        elif record.is_stream:
            record.first_byte_s = record.arrived_s + first_s
            core.history.first_byte(record.first_byte_s, first_s)
        if outcome is RequestOutcome.OK and not goes_alone:
            lane = LANES["a"] if p.address.host_id == d.address.host_id else LANES["b"]
            seconds = draw.lognormvariate(-4.4 if lane == LANES["a"] else -3.2, 0.3)
            moved = {"lane": lane, "transfer_s": seconds, "blocks_moved": 120, "bytes_moved": 120 << 20}
            core.history.transferred(p.ref.agent_id, d.ref.agent_id, {"prefill": "remote", **moved})
        core.metrics.placed(reason.value)
        ended_s = record.arrived_s + first_s + draw.uniform(0.5, 4.0)
        status = 200 if outcome is RequestOutcome.OK else 502
        record.finish(outcome, status, 900, now_s=ended_s, metrics=core.metrics, history=core.history)
    moment[0] += 3.0


async def photograph(path: pathlib.Path, scheme: str) -> None:
    draw = random.Random(27)
    moment = [10_000.0]
    workers = Workers()
    workers.is_connected = True
    members = fleet(draw)
    workers.update(Membership(1, tuple(members)))
    core = RouterCore(
        RouterOptions(coordinator="10.0.0.1:7700"), workers, RouterMetrics(workers), now=lambda: moment[0]
    )
    live(core, members, moment, draw)
    claims = [
        workers.claim(member.ref, Part.PREFILL if member.info.role is Role.PREFILL else Part.DECODE)
        for member in members
        for _ in range(draw.randrange(1, 9))
    ]
    workers.drain("prefill-b0", True)
    door, bodies = Door(AdmitOptions()), Bodies(RouterOptions())
    door.inflight = len(claims) // 2
    access = AdminAccess(ApiKeys(), is_loopback=True)
    app = build_app(core, ApiKeys(), door, Front(core, ApiKeys(), door), access, bodies)
    with listening("127.0.0.1", 0) as listener, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        server = Quiet(uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ui"
        async with browsing(pathlib.Path(profile)) as browser:
            tab = await browser.open(url, scheme=scheme, width=SIZE[0], height=SIZE[1])
            await tab.until("document.querySelector('#decisions tbody').rows.length > 0")
            content = await tab.screenshot()
        server.should_exit = server.force_exit = True
        await serving
    await asyncio.to_thread(path.write_bytes, content)
    for claim in claims:
        claim.release()


if __name__ == "__main__":
    asyncio.run(photograph(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "light"))
