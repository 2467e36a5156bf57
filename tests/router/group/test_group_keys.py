"""API keys in several processes: all have those that the leader read, and their limits are one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.observe import redact
from kvxfer.openai.errors import RequestError
from kvxfer.policy.keylimits import KeyLimits
from kvxfer.router.auth import ApiKeys
from kvxfer.router.group.keys import FollowingKeys, LeadingKeys
from kvxfer.router.group.segment import SharedCounts
from kvxfer.router.keyed import KeyedRequest, RateLimitedError
from kvxfer.router.keyfile import KeyEntry, digest_of, plain_entry
from tests.support.fleet import FakeClock

MEMBERS = 3


def holder(name: str, **limits: Any) -> KeyEntry:
    return KeyEntry(name, (digest_of(f"key-of-{name}".encode()),), KeyLimits(**limits))


class Wire:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *message: Any) -> None:
        self.sent.append(json.loads(json.dumps(message)))


class Group:
    """A leader and members in one process, over real shared memory."""

    def __init__(self, *entries: KeyEntry) -> None:
        self.clock = FakeClock()
        self.segment = SharedCounts.make(MEMBERS + 1)
        self.keys = ApiKeys(now=self.clock)
        self.keys.replace(entries)
        self.leading = LeadingKeys(self.keys, self.segment, MEMBERS, now=self.clock)
        self.wires: dict[int, Wire] = {}
        self.members: dict[int, FollowingKeys] = {}
        for row in range(MEMBERS):
            self.join(row)

    def join(self, row: int) -> None:
        self.wires[row] = Wire()
        self.members[row] = FollowingKeys(self.segment, row, now=self.clock)
        self.leading.join(row, self.wires[row])  # type: ignore[arg-type]
        self.deliver(row)

    def deliver(self, *rows: int) -> None:
        for row in rows or self.wires:
            told, self.wires[row].sent = self.wires[row].sent, []
            for _, plain in told:
                self.leading.applied(row, self.members[row].apply(plain))

    def kill(self, row: int) -> None:
        del self.members[row], self.wires[row]
        self.segment.clear(row)
        self.leading.leave(row)

    def change(self, *entries: KeyEntry) -> None:
        self.keys.replace(entries)
        self.deliver()

    def everywhere(self) -> list[ApiKeys]:
        return [self.keys, *(member.keys for member in self.members.values())]

    def admitted(self, name: str, count: int) -> int:
        """Of so many requests, spread over all processes."""
        return sum(entered(self.everywhere()[number % (MEMBERS + 1)], name) is not None for number in range(count))


def entered(keys: ApiKeys, name: str) -> KeyedRequest | None:
    try:
        return keys.enter(f"Bearer key-of-{name}")
    except RateLimitedError:
        return None


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(
        holder("a", requests_per_minute=10), holder("b", max_inflight=2), holder("c"), plain_entry("key-of-plain")
    )
    yield made
    made.segment.close()


def test_all_have_the_keys_and_no_key_is_told(group: Group) -> None:
    for keys in group.everywhere():
        for name in ("a", "b", "c", "plain"):
            assert keys.check(f"Bearer key-of-{name}") is not None
        with pytest.raises(RequestError):
            keys.check("Bearer other")
    group.keys.replace(group.keys.entries)
    assert "key-of" not in json.dumps(group.wires[0].sent)


def test_models_of_holders_are_told_once(group: Group) -> None:
    names = frozenset(f"model-{number}" for number in range(100))
    limited = [dataclasses.replace(holder(f"m{number}"), models=names) for number in range(50)]
    one = dataclasses.replace(holder("one"), models=frozenset(["tiny"]))
    group.keys.replace([*limited, one, holder("all")])
    assert json.dumps(group.wires[0].sent).count('model-7"') == 1
    group.deliver()
    for keys in group.everywhere():
        for name, models in (("m49", names), ("one", one.models), ("all", None)):
            found = keys.check(f"Bearer key-of-{name}")
            assert found is not None
            assert found.models == models


def test_a_key_that_was_used_is_blacked_out_in_logs(group: Group) -> None:
    key = "sk-used-once-by-late"
    entry = KeyEntry("late", (digest_of(key.encode()),))
    group.change(entry)
    assert key in redact(key)
    assert group.members[0].keys.check(f"Bearer {key}") is not None
    assert key not in redact(f"said {key}")


def test_limits_are_one_for_all(group: Group) -> None:
    assert group.admitted("a", 30) == 10
    assert group.admitted("c", 30) == 30
    group.clock.now_s += 12.0
    assert group.admitted("a", 30) == 2


def test_requests_at_once_are_one_count_and_those_of_a_dead_process_end(group: Group) -> None:
    leading, *members = group.everywhere()
    first = entered(members[0], "b")
    assert first is not None
    assert entered(members[1], "b") is not None
    assert all(entered(keys, "b") is None for keys in group.everywhere())
    first.end()
    assert entered(leading, "b") is not None
    assert entered(members[2], "b") is None
    group.kill(1)
    assert entered(members[2], "b") is not None


def test_a_replaced_process_goes_on_where_the_others_are(group: Group) -> None:
    for _ in range(10):
        assert entered(group.members[1].keys, "a") is not None
    group.kill(1)
    group.clock.now_s += 6.0
    group.join(1)
    assert entered(group.members[1].keys, "a") is not None
    assert group.admitted("a", 8) == 0


def test_changes_reach_all_and_keep_what_was_used(group: Group) -> None:
    assert group.admitted("a", 8) == 8
    group.change(holder("a", requests_per_minute=12), holder("b", requests_per_minute=4))
    assert group.admitted("a", 8) == 4
    assert group.admitted("b", 8) == 4
    for keys in group.everywhere():
        with pytest.raises(RequestError):
            keys.check("Bearer key-of-c")


def test_a_new_limit_is_one_bucket_though_processes_hear_of_it_at_different_times(group: Group) -> None:
    group.keys.replace([holder("c", requests_per_minute=10)])
    group.deliver(0)
    for _ in range(10):
        assert entered(group.members[0].keys, "c") is not None
    assert entered(group.members[0].keys, "c") is None
    group.deliver()
    assert group.admitted("c", 8) == 0


def test_a_limit_that_goes_and_comes_back_begins_full_as_in_one_process(group: Group) -> None:
    assert group.admitted("a", 30) == 10
    group.change(holder("a"))
    assert group.admitted("a", 30) == 30
    group.change(holder("a", requests_per_minute=10))
    assert group.admitted("a", 30) == 10


def test_a_holder_that_is_gone_leaves_its_seat_once_all_know(group: Group) -> None:
    running = entered(group.members[2].keys, "b")
    assert running is not None
    seats = group.leading._seats
    taken = len(seats._seats)
    group.keys.replace([holder("a", requests_per_minute=10)])
    group.deliver(0, 1)
    group.keys.replace([holder("a", requests_per_minute=11)])
    assert len(seats._seats) == taken  # one of them may still count there
    group.deliver()
    group.keys.replace([holder("a", requests_per_minute=12), holder("d", max_inflight=1)])
    assert len(seats._seats) == taken
    group.deliver()
    running.end()
    assert not group.segment.keys[:, 0].any()
    assert entered(group.members[2].keys, "d") is not None
    assert entered(group.members[0].keys, "d") is None


def test_a_look_sees_what_others_used(group: Group) -> None:
    for _ in range(6):
        assert entered(group.members[0].keys, "a") is not None
    use = next(iter(group.members[1]._uses.values()))
    group.members[1].cells.look(group.clock())
    assert use.meter is not None
    assert use.meter._requests is not None
    assert use.meter._requests.level == pytest.approx(4.0)


def test_a_broken_file_changes_nothing_for_a_process_that_begins(group: Group, tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("keys: nothing")
    with pytest.raises(ConfigError):
        group.keys.load(str(path))
    group.kill(0)
    group.join(0)
    assert group.members[0].keys.check("Bearer key-of-a") is not None
