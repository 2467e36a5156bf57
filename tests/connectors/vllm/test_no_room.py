"""Engines of both roles with little room: the scheduler halves of several, over a model of vLLM's scheduler, of what
their worker halves say, and of time. Every prompt ends, and nothing is taken back where something running makes room.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest

from kvxfer.connectors.common.ids import blocks_for
from kvxfer.connectors.vllm.groups import KvGroups
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.scheduler import SchedulerHalf
from kvxfer.connectors.vllm.steps import Report, Standing, StepOrders
from kvxfer.types import TransferId
from tests.support.vllm_connector.scheduler import BLOCK, Request, Status, step

STEP_NS = 10_000_000
BLOCKS, PROMPT = 23, 8 * BLOCK
OUTPUT = 4
"""Tokens that a decode makes."""


@dataclasses.dataclass
class Kept:
    """A computed prompt, as the worker half keeps it."""

    request: Request
    is_read: bool = False


class Engine:
    """One vLLM: first come, first served; a prompt takes a step, and each token after it another."""

    def __init__(self, name: str, role: str, world: World) -> None:
        extra = {"coordinator": "127.0.0.1:1", "agent_id": name}
        self.name, self.world = name, world
        self.half = SchedulerHalf(
            ConnectorOptions.from_config(role, name, extra),
            groups=KvGroups.plain(BLOCK),
            agents=(name,),
            mint=lambda: TransferId(bytes(16)),
            adapter_fingerprint=str,
            now_ns=lambda: world.now_ns,
        )
        self.free = BLOCKS
        self.seats = 1 << 10
        self.blocks: dict[str, int] = {}
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[str, tuple[Request, int]] = {}
        self.loading: dict[str, Request] = {}
        self.kept: dict[TransferId, Kept] = {}
        self.waits: dict[str, TransferId] = {}
        self.accounts: dict[str, str] = {}
        """The code of each decode that ended."""
        self.ended_at: dict[str, int] = {}
        self.revoked = 0
        self.freed_now: list[str] = []

    def add(self, request: Request) -> None:
        self.half.on_new_request(request)
        self.waiting.append(request)

    def turn(self) -> None:
        self.hear()
        new, cached = {}, {}
        for name, (_, left) in self.running.items():
            cached[name] = ((), PROMPT + self.world.output - left, 1)
        self.schedule(new)
        orders = step(self.half, new, cached)
        self.obey(orders)
        for name in (*cached, *new):
            request, left = self.running[name]
            self.running[name] = (request, left - 1)
            if left <= 1:
                self.finish(request)

    def schedule(self, new: dict[str, tuple[list[int], int, int]]) -> None:
        skipped = []
        while self.waiting and len(self.running) < self.seats:
            request = self.waiting[0]
            has_kv = request.request_id in self.blocks
            count = 0 if has_kv else self.half.matched(request, 0)
            if count is None:
                skipped.append(self.waiting.popleft())
                continue
            if not has_kv:
                need = blocks_for(count, BLOCK) if count else blocks_for(request.num_prompt_tokens + 1, BLOCK)
                if need > self.free:
                    break
                self.take(request, need)
                self.half.allocated(request, [list(range(1, need + 1))], count)
                if count:
                    self.loading[request.request_id] = self.waiting.popleft()
                    continue
            elif self.blocks[request.request_id] == blocks_for(PROMPT - 1, BLOCK):  # for the tokens that it makes
                if not self.free:
                    break
                self.take(request, 1)
            self.waiting.popleft()
            request.status = Status.RUNNING
            is_prefill = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
            self.running[request.request_id] = (request, 1 if is_prefill else self.world.output)
            count = self.blocks[request.request_id]
            new[request.request_id] = (list(range(1, count + 1)), 0, request.num_prompt_tokens)
        self.waiting.extendleft(reversed(skipped))

    def take(self, request: Request, count: int) -> None:
        self.free -= count
        self.blocks[request.request_id] = self.blocks.get(request.request_id, 0) + count

    def give(self, request_id: str) -> None:
        self.free += self.blocks.pop(request_id, 0)

    def finish(self, request: Request) -> None:
        del self.running[request.request_id]
        request.status = Status.FINISHED_LENGTH_CAPPED
        is_kept, answer = self.half.finished(request, [list(range(1, self.blocks[request.request_id] + 1))])
        self.ended_at[request.request_id] = self.world.now_ns
        if not is_kept:
            self.give(request.request_id)
            self.accounts[request.request_id] = (answer or {}).get("kvxfer", {}).get("code", "")

    def obey(self, orders: StepOrders) -> None:
        """What the worker half does at once; :meth:`hear` is what it says of it a step later."""
        for wait in orders.waits:
            self.waits[wait.request_id] = wait.transfer_id
        for finish in orders.finishes:
            self.kept[finish.transfer_id] = Kept(Request(finish.request_id, [], None))
        for revoke in orders.revokes:
            self.revoked += 1
            for transfer_id in [key for key, kept in self.kept.items() if kept.request.request_id == revoke.request_id]:
                self.let_go(transfer_id)
        for load in orders.loads:
            source = self.world.engines[load.sources[0]]
            kept = source.kept.get(load.transfer_id)
            if kept is not None:
                kept.is_read = True
                source.half.read([kept.request.request_id])
            self.world.loads.append((self, load.request_id, load.transfer_id, source))

    def let_go(self, transfer_id: TransferId) -> None:
        kept = self.kept.pop(transfer_id)
        self.freed_now.append(kept.request.request_id)

    def hear(self) -> None:
        freed, self.freed_now = self.freed_now, []
        self.half.sent(freed)
        for request_id in freed:
            self.give(request_id)
        for request_id, transfer_id in list(self.waits.items()):
            if any(transfer_id in engine.kept for engine in self.world.engines.values()):
                del self.waits[request_id]
                self.half.stands([Standing(request_id, True, is_over=True)])

    def loaded(self, request_id: str, transfer_id: TransferId, source: Engine) -> None:
        code = ""
        if transfer_id in source.kept:
            source.let_go(transfer_id)
        else:
            code = "grant_revoked"
        request = self.loading.pop(request_id)
        text = "no_room" if code else ""
        report = Report(request_id, str(transfer_id), code, text, "", 8, 0, 1, 0.0, 0.0, 0, 1)
        self.half.reported([report])
        self.half.received([request_id])
        if code:
            self.give(request_id)
        self.waiting.appendleft(request)


class World:
    def __init__(self, count: int, role: str = "kv_both", output: int = OUTPUT) -> None:
        self.output = output
        self.now_ns = 1_000_000_000
        self.loads: list[tuple[Engine, str, TransferId, Engine]] = []
        self.engines = {f"e{number}": Engine(f"e{number}", role, self) for number in range(count)}

    def send(self, number: int, prefill: int, decode: int) -> None:
        transfer_id = f"{number + 1:032x}"
        ends = {"source": {"agent_id": f"e{prefill}"}, "destination": {"agent_id": f"e{decode}"}}
        for engine, kind, name in ((decode, "prefill", "d"), (prefill, "decode", "p")):
            params = {f"do_remote_{kind}": True, "transfer_id": transfer_id, **ends}
            self.engines[f"e{engine}"].add(Request(f"{name}{number}", list(range(PROMPT)), params))

    def run(self, seconds: float) -> float:
        """Until all have ended, at most so long; how long it took."""
        begun_ns = self.now_ns
        while self.now_ns < begun_ns + seconds * 1e9 and self.is_busy:
            loads, self.loads = self.loads, []
            for engine in self.engines.values():
                engine.turn()
            for engine, request_id, transfer_id, source in loads:
                engine.loaded(request_id, transfer_id, source)
            self.now_ns += STEP_NS
        return (self.now_ns - begun_ns) / 1e9

    @property
    def is_busy(self) -> bool:
        return any(e.waiting or e.running or e.loading or e.kept or e.freed_now for e in self.engines.values())

    @property
    def revoked(self) -> int:
        return sum(engine.revoked for engine in self.engines.values())


def in_circles(world: World, prompts: int) -> int:
    """Each engine computes for the next, and decodes of the one before."""
    count = len(world.engines)
    for number in range(prompts):
        for prefill in range(count):
            world.send(number * count + prefill, prefill, (prefill + 1) % count)
    return prompts * count


@pytest.mark.parametrize("engines", [2, 3, 5])
@pytest.mark.parametrize("prompts", [3, 12])
def test_a_circle_of_engines_ends(engines: int, prompts: int) -> None:
    world = World(engines)
    total = in_circles(world, prompts)
    took_s = world.run(60.0)
    assert not world.is_busy
    codes = [code for engine in world.engines.values() for code in engine.accounts.values()]
    assert len(codes) == total
    assert set(codes) <= {"", "grant_revoked"}
    assert codes.count("grant_revoked") == world.revoked  # each is told to the client, and nothing else went wrong
    assert world.revoked <= total // 2
    assert took_s < 0.1 + 0.2 * prompts  # of steps of 10 ms: no patience of seconds was needed
    assert {engine.free for engine in world.engines.values()} == {BLOCKS}


def test_without_the_rule_the_circle_stays() -> None:
    world = World(2)
    for engine in world.engines.values():
        engine.half._held._room = None
    in_circles(world, 3)
    world.run(60.0)
    assert world.is_busy


@pytest.mark.parametrize("tokens", [3, 50, 150])
def test_under_pressure_of_running_requests_nothing_is_taken_back(tokens: int) -> None:
    """Both compute for each other, and for themselves: the pools are full most of the time, and blocks come back every
    so many steps."""
    world = World(2, output=tokens)
    for number in range(20):
        world.send(number, number % 2, 1 - number % 2)
        for engine in world.engines.values():
            plain = Request(f"plain {number}", list(range(3 * BLOCK)), None)
            engine.add(plain)
    assert world.run(60.0) < 60.0
    assert not world.is_busy
    assert world.revoked == 0


def kept_for_late_readers(world: World, count: int) -> Engine:
    """An engine that has computed so many prompts, which no engine comes for."""
    engine = world.engines["e0"]
    for number in range(count):
        params = {"do_remote_decode": True, "transfer_id": f"{number + 1000:032x}"}
        engine.add(Request(f"kept {number}", list(range(PROMPT)), params))
    while len(engine.kept) < count:
        engine.turn()
    return engine


def test_a_request_that_waits_for_a_seat_lacks_no_blocks() -> None:
    """All seats are taken for five seconds, and two thirds of the pool are free."""
    world = World(2, output=500)
    engine = kept_for_late_readers(world, 1)
    engine.seats = 1
    engine.add(Request("plain", list(range(BLOCK)), None))
    world.send(0, 1, 0)  # its prompt is granted elsewhere
    computed = {"do_remote_prefill": True, "transfer_id": "f" * 32, "source": {"agent_id": "e1"}}
    engine.add(Request("d1", list(range(PROMPT)), computed))
    world.run(0.1)
    engine.half.stands(
        [Standing("d1", True, is_over=True, code="peer_gone", text="")]
    )  # and this one's is computed here
    world.run(4.5)
    assert {"plain"} == set(engine.running)
    assert world.revoked == 0
    assert engine.half.take_gauges() is not None


def test_a_fetched_prompt_without_a_block_for_its_tokens_gets_one() -> None:
    """vLLM asks the connector nothing more of it, and nothing else runs."""
    world = World(2)
    engine = kept_for_late_readers(world, 1)
    engine.free = blocks_for(PROMPT - 1, BLOCK)
    world.send(0, 1, 0)
    world.run(1.0)
    assert (engine.free, engine.running, len(engine.waiting)) == (0, {}, 1)
    assert engine.revoked == 0
    world.run(2.0)
    assert (engine.accounts, engine.revoked) == ({"d0": ""}, 1)


def test_a_prefill_that_waits_for_readers_is_patient() -> None:
    """A pool full of prompts whose readers come late is no circle: two seconds pass before one is taken back."""
    world = World(2)
    for number in range(3):
        request = Request(
            f"p{number}", list(range(PROMPT)), {"do_remote_decode": True, "transfer_id": f"{number:032x}"}
        )
        world.engines["e0"].add(request)
    world.run(1.9)
    assert world.revoked == 0
    assert len(world.engines["e0"].waiting) == 1
    world.run(0.3)
    assert world.revoked == 1
    assert not world.engines["e0"].waiting


def test_a_prefill_engine_takes_nothing_back() -> None:
    world = World(1, "kv_producer")
    for number in range(3):
        request = Request(
            f"p{number}", list(range(PROMPT)), {"do_remote_decode": True, "transfer_id": f"{number:032x}"}
        )
        world.engines["e0"].add(request)
    world.run(30.0)
    assert (world.revoked, len(world.engines["e0"].waiting)) == (0, 1)
