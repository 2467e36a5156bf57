"""A leader and processes that follow it, without processes: what one meets is seen by all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.errors import NoWorkerError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.health import HealthEvent, HealthOptions, HealthState
from kvxfer.policy.pairs import PairOptions
from kvxfer.policy.place import place
from kvxfer.router.fleet.entry import WorkerEntry
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.group.follower import FollowingWorkers
from kvxfer.router.group.leader import Leader, LeadingWorkers, ToldMember
from kvxfer.router.group.messages import Update
from kvxfer.router.group.plain import from_plain
from kvxfer.router.group.segment import SharedBoard, SharedCounts
from kvxfer.types import AgentRef, Membership, Role
from tests.support.fleet import FakeClock, member, stock

ROWS = 3


class Wire:
    """A channel to a member: what is sent arrives when ``deliver`` is called."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *message: Any) -> None:
        self.sent.append(json.loads(json.dumps(message)))


class Group:
    """A leader and its members in one process, with real shared memory between them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.segment = SharedCounts.make(ROWS)
        fleet: dict[str, Any] = {
            "now": self.clock,
            "draw": lambda: 0.0,
            "health": HealthOptions(),
            "pairs": PairOptions(),
        }
        self.fleet = fleet
        board = SharedBoard(self.segment, None)
        self.workers = LeadingWorkers(board=board, **fleet)
        self.leader = Leader(self.workers, board, self.segment, now=self.clock)
        self.wires: dict[int, tuple[Wire, Wire]] = {}
        self.members: dict[int, FollowingWorkers] = {}

    def join(self, row: int) -> FollowingWorkers:
        down, up = Wire(), Wire()
        self.wires[row] = down, up
        following = FollowingWorkers(SharedBoard(self.segment, row), up.send, **self.fleet)
        self.members[row] = following
        self.leader.join(ToldMember(row, down))  # type: ignore[arg-type]
        self.deliver()
        return following

    def kill(self, row: int) -> None:
        del self.members[row]
        del self.wires[row]
        self.leader.leave(row)
        self.deliver()

    def deliver(self) -> None:
        """Until all know what there is to know."""
        for _ in range(4):
            for row, (_, up) in self.wires.items():
                said, up.sent = up.sent, []
                for message in said:
                    self.leader.report(row, message)
            self.leader._tell()
            for row, (down, up) in self.wires.items():
                told, down.sent = down.sent, []
                for _, update in told:
                    value = from_plain(Update, update)
                    self.members[row].apply(value)
                    up.send("applied", value.version)

    def everywhere(self) -> list[Workers]:
        return [self.workers, *self.members.values()]

    def ref(self, name: str) -> AgentRef:
        [found] = [one.ref for one in self.workers.members() if one.ref.agent_id == name]
        return found

    def entry(self, name: str) -> WorkerEntry:
        [found] = [entry for entry in self.workers.entries() if entry.worker.agent_id == name]
        return found


def chosen(workers: Workers, draws: int = 16) -> set[str]:
    return {place(workers.candidates(), model="m", tie_break=n).decode.ref.agent_id for n in range(draws)}


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    made.workers.replace("flags", [stock("d0"), stock("d1")])
    for row in range(ROWS):
        made.join(row)
    yield made
    made.segment.close()


def test_every_member_knows_the_workers_by_the_same_incarnation(group: Group) -> None:
    listed = [workers.members() for workers in group.everywhere()]
    assert all(members == listed[0] for members in listed)
    assert [workers.models() for workers in group.everywhere()] == [("m",)] * (ROWS + 1)
    assert all(workers.describe() == group.workers.describe() for workers in group.everywhere())


def test_every_member_describes_what_is_in_flight_in_all(group: Group) -> None:
    """Whatever else was asked before: a drain asks nothing else."""
    group.members[0].claim(group.ref("d0"), Part.DECODE)
    held = group.members[1].hold(group.ref("d1"))
    for workers in group.everywhere():
        shown = {one["agent_id"]: one["inflight"] for one in workers.describe()}
        assert shown == {"d0": {"prefill": 0, "decode": 1, "held": 0}, "d1": {"prefill": 0, "decode": 0, "held": 1}}
    assert held is not None
    held.release()
    assert all(workers.describe()[1]["inflight"]["held"] == 0 for workers in group.everywhere())


def test_claims_of_one_member_are_the_load_of_all(group: Group) -> None:
    ref = group.ref("d0")
    claims = [group.members[row].claim(ref, Part.DECODE) for row in range(ROWS) for _ in range(row + 1)]
    claims.append(group.members[0].claim(ref, Part.PREFILL))
    for workers in group.everywhere():
        assert workers.inflight()["d0", "decode"] == 6
        assert workers.inflight()["d0", "prefill"] == 1
        [candidate] = [one for one in workers.candidates() if one.member.ref == ref]
        assert (candidate.prefill_inflight, candidate.decode_inflight) == (1, 6)
        assert chosen(workers) == {"d1"}
    for claim in claims:
        claim.release()
    assert all(workers.inflight()["d0", "decode"] == 0 for workers in group.everywhere())
    assert all(chosen(workers) == {"d0", "d1"} for workers in group.everywhere())


def test_claims_of_a_killed_member_return(group: Group) -> None:
    ref = group.ref("d0")
    for _ in range(5):
        group.members[1].claim(ref, Part.DECODE)
    kept = group.members[2].claim(ref, Part.DECODE)
    group.kill(1)
    assert all(workers.inflight()["d0", "decode"] == 1 for workers in group.everywhere())
    group.join(1)
    assert group.members[1].inflight()["d0", "decode"] == 1
    kept.release()
    assert all(workers.inflight()["d0", "decode"] == 0 for workers in group.everywhere())


def test_refused_connection_met_by_one_ejects_for_all(group: Group) -> None:
    group.members[0].failed(group.ref("d0"), "unreachable", "r")
    group.deliver()
    assert all(chosen(workers) == {"d1"} for workers in group.everywhere())
    assert all(workers.states()["d0"] is HealthState.OUT for workers in group.everywhere())
    assert group.workers.counters.ejections == {("d0", "unreachable"): 1}


def test_failures_in_a_row_add_up_over_members(group: Group) -> None:
    ref = group.ref("d0")
    for row in range(ROWS):
        assert group.workers.states()["d0"] is HealthState.IN
        group.members[row].failed(ref, "lost", f"r{row}")
        group.deliver()
    assert all(workers.states()["d0"] is HealthState.OUT for workers in group.everywhere())


def test_success_anywhere_ends_failures_in_a_row(group: Group) -> None:
    ref = group.ref("d0")
    for row in range(2):
        group.members[row].failed(ref, "lost", f"r{row}")
    group.deliver()
    group.members[2].succeeded(ref, "r2")
    group.deliver()
    group.members[0].failed(ref, "lost", "r3")
    group.deliver()
    assert all(workers.states()["d0"] is HealthState.IN for workers in group.everywhere())


def test_success_at_a_worker_of_which_nothing_bad_is_known_is_not_told(group: Group) -> None:
    for number in range(100):
        group.members[0].succeeded(group.ref("d0"), f"r{number}")
    assert not group.wires[0][1].sent


def test_failure_counts_once_a_request_whichever_member_met_it(group: Group) -> None:
    for row in range(ROWS):
        for name in ("d0", "d1"):
            group.members[row].failed(group.ref(name), "lost", "one")
    group.deliver()
    assert all(set(workers.states().values()) == {HealthState.IN} for workers in group.everywhere())


def eject_and_open(group: Group) -> AgentRef:
    ref = group.ref("d0")
    group.members[0].failed(ref, "unreachable", "r")
    group.deliver()
    group.clock.now_s += 1.0
    group.workers.probed(group.entry("d0"), HealthEvent.PROBE_PASSED)
    group.deliver()
    assert all(workers.states()["d0"] is HealthState.HALF_OPEN for workers in group.everywhere())
    return ref


def test_half_open_worker_is_tried_by_one_member_and_comes_back_for_all(group: Group) -> None:
    ref = eject_and_open(group)
    claim = group.members[1].claim(ref, Part.DECODE, "trial")
    group.deliver()
    assert all(chosen(workers) == {"d1"} for workers in group.everywhere())
    group.members[1].succeeded(ref, "trial")
    claim.release()
    group.deliver()
    assert all(workers.states()["d0"] is HealthState.SLOW_START for workers in group.everywhere())
    group.clock.now_s += 60.0
    assert all(workers.states()["d0"] is HealthState.IN for workers in group.everywhere())
    group.deliver()
    group.wires[0][1].sent.clear()
    group.members[0].succeeded(ref, "x")
    assert not group.wires[0][1].sent


def test_trial_without_a_verdict_opens_the_worker_to_others(group: Group) -> None:
    ref = eject_and_open(group)
    group.members[1].claim(ref, Part.DECODE, "trial").release()
    group.deliver()
    assert all("d0" in chosen(workers) for workers in group.everywhere())


def test_trial_of_a_killed_member_is_over(group: Group) -> None:
    ref = eject_and_open(group)
    group.members[1].claim(ref, Part.DECODE, "trial")
    group.deliver()
    assert chosen(group.members[0]) == {"d1"}
    group.kill(1)
    assert all("d0" in chosen(workers) for workers in group.everywhere())


def test_drain_holds_for_all_and_for_a_member_that_comes_later(group: Group) -> None:
    group.workers.drain("d0")
    group.deliver()
    assert all(chosen(workers) == {"d1"} for workers in group.everywhere())
    group.kill(0)
    group.join(0)
    assert chosen(group.members[0]) == {"d1"}
    group.workers.drain("d0", False)
    group.deliver()
    assert all(chosen(workers) == {"d0", "d1"} for workers in group.everywhere())


def test_worker_that_is_gone_is_gone_for_all_while_its_requests_end(group: Group) -> None:
    ref = group.ref("d0")
    claim = group.members[0].claim(ref, Part.DECODE)
    group.workers.replace("flags", [stock("d1")])
    group.deliver()
    assert all([m.ref.agent_id for m in workers.members()] == ["d1"] for workers in group.everywhere())
    with pytest.raises(NoWorkerError):
        group.members[1].claim(ref, Part.DECODE)
    assert group.members[0].worker(ref).agent_id == "d0"  # a request of its own still runs there
    assert group.segment.inflight(0) == 1
    claim.release()
    group.deliver()
    assert group.segment.inflight(0) == 0


def test_seat_of_a_gone_worker_goes_to_another_once_nothing_runs_there(group: Group) -> None:
    claim = group.members[0].claim(group.ref("d0"), Part.DECODE)
    group.workers.replace("flags", [stock("d1"), stock("d2")])
    group.deliver()
    new = group.members[1].claim(group.ref("d2"), Part.DECODE)
    assert all(workers.inflight()["d2", "decode"] == 1 for workers in group.everywhere())
    claim.release()
    group.deliver()
    group.workers.replace("flags", [stock("d1"), stock("d2"), stock("d3")])
    group.deliver()
    assert all(workers.inflight()["d3", "decode"] == 0 for workers in group.everywhere())
    other = group.members[2].claim(group.ref("d3"), Part.DECODE)
    assert group.segment.inflight(0) == 1  # the seat that d0 had
    assert all(workers.inflight()["d3", "decode"] == 1 for workers in group.everywhere())
    for one in (new, other):
        one.release()


def test_incarnation_that_ended_ends_the_watches_of_all() -> None:
    group = Group()
    group.workers.update(Membership(1, (member("d"),)))
    for row in range(ROWS):
        group.join(row)
    ended: list[int] = []
    for row in range(ROWS):
        group.members[row].watch(group.ref("d"), lambda row=row: ended.append(row))  # type: ignore[misc]
    group.workers.update(Membership(2, ()))
    group.deliver()
    assert sorted(ended) == list(range(ROWS))
    group.segment.close()


def test_suspicion_weighs_the_same_for_all_when_the_coordinator_is_not_heard() -> None:
    group = Group()
    group.workers.is_connected = True
    group.workers.update(Membership(1, (member("d0", is_suspect=True), member("d1"))))
    for row in range(ROWS):
        group.join(row)
    assert all(chosen(workers) == {"d1"} for workers in group.everywhere())
    group.workers.is_connected = False
    group.deliver()
    told = [workers.describe() for workers in group.everywhere()]
    assert all(one == told[0] for one in told)
    assert not any(workers.is_connected for workers in group.everywhere())
    group.segment.close()


def pairs_group() -> tuple[Group, list[AgentRef], list[AgentRef]]:
    group = Group()
    prefill: list[Worker] = [stock(f"p{n}", Role.PREFILL) for n in range(2)]
    decode: list[Worker] = [stock(f"d{n}") for n in range(2)]
    group.workers.replace("flags", [*prefill, *decode])
    for row in range(ROWS):
        group.join(row)
    return group, [group.ref(f"p{n}") for n in range(2)], [group.ref(f"d{n}") for n in range(2)]


def test_pair_that_fails_for_several_is_ejected_for_all_and_comes_back_for_all() -> None:
    group, (p0, p1), (d0, d1) = pairs_group()
    group.members[0].pair_succeeded(p0, d1)
    group.members[1].pair_succeeded(p1, d0)
    group.deliver()
    for row in range(ROWS):
        group.members[row].pair_failed(p0, d0, f"r{row}")
        group.deliver()
    assert all(workers.ejected_pairs() == {(p0, d0)} for workers in group.everywhere())
    group.clock.now_s += 2.0
    assert all(not workers.ejected_pairs() for workers in group.everywhere())
    group.members[2].pair_started(p0, d0)
    group.deliver()
    assert all(workers.ejected_pairs() == {(p0, d0)} for workers in group.everywhere())
    group.members[2].pair_succeeded(p0, d0)
    group.deliver()
    group.clock.now_s += 0.1
    assert all(not workers.ejected_pairs() for workers in group.everywhere())
    group.segment.close()


def test_pair_success_is_told_once_a_second_unless_something_is_wrong() -> None:
    group, (p0, _), (d0, _) = pairs_group()
    up = group.wires[0][1]
    up.sent.clear()
    for _ in range(100):
        group.members[0].pair_succeeded(p0, d0)
    assert len(up.sent) == 1
    group.members[1].pair_failed(p0, d0, "r")
    group.deliver()
    for _ in range(3):
        group.members[0].pair_succeeded(p0, d0)
    assert len(up.sent) == 3
    group.segment.close()


def test_report_that_makes_no_sense_changes_nothing(group: Group) -> None:
    before = group.workers.describe()
    for message in (["failed", None, "lost", "r"], ["failed", ["x"], 3, ""], ["what"], ["trial"], ["applied", "x"]):
        group.leader.report(0, message)
    assert group.workers.describe() == before
