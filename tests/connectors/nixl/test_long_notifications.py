"""Notifications of up to 16 MiB, and what bounds those that wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.nixl import nixl_agent, settings
from kvxfer.connectors.nixl.bindings import nixlInvalidParamError, nixlNotAllowedError
from tests.support.nixl.agents import MakeAgent, finish, memory, notifications, register, row, until

LONGEST = 16 << 20
NAME = "a target / whose name is no agent id"


def message(seed: int, length: int = LONGEST) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def meet(initiator: nixl_agent, target: nixl_agent) -> Any:
    """A transfer of one page between agents that know each other: its local and its remote side."""
    ours, theirs = memory(4096, seed=1), memory(4096, seed=2)
    register(initiator, ours)
    register(target, theirs)
    initiator.add_remote_agent(target.get_agent_metadata())
    return initiator.get_xfer_descs([row(ours)], "DRAM"), initiator.get_xfer_descs([row(theirs)], "DRAM"), ours, theirs


def test_long_notification_arrives_whole_and_in_order(pair: tuple[nixl_agent, nixl_agent]) -> None:
    initiator, target = pair
    meet(initiator, target)
    sent = [b"first", message(1), message(2, 300_000), b"last"]
    for text in sent:
        initiator.send_notif("target", text)
    assert notifications(target, len(sent)) == {"initiator": sent}


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("length", [196_608, 196_609, LONGEST])
def test_long_notification_of_a_transfer_comes_once_each_time(
    op: str, length: int, pair: tuple[nixl_agent, nixl_agent]
) -> None:
    initiator, target = pair
    local, remote, ours, theirs = meet(initiator, target)
    text = message(length, length)
    handle = initiator.initialize_xfer(op, local, remote, "target", text)
    for _ in range(2):
        finish(initiator, handle)
        assert notifications(target) == {"initiator": [text]}
    assert (ours == theirs).all()
    initiator.release_xfer_handle(handle)


def test_a_byte_more_is_refused_with_its_bound(pair: tuple[nixl_agent, nixl_agent]) -> None:
    initiator, target = pair
    local, remote, *_ = meet(initiator, target)
    text = bytes(LONGEST + 1)
    with pytest.raises(nixlInvalidParamError, match=str(LONGEST)):
        initiator.send_notif("target", text)
    with pytest.raises(nixlInvalidParamError, match=str(LONGEST)):
        initiator.initialize_xfer("WRITE", local, remote, "target", text)


def test_bytes_that_wait_for_an_agent_are_bounded_and_it_is_named(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "MESSAGE_BYTES_MAX", 300_000)
    monkeypatch.setattr(settings, "QUEUE_BYTES_MAX", 1_000_000)
    initiator, target = make_agent("initiator"), make_agent(NAME)
    local, remote, *_ = meet(initiator, target)
    handle = initiator.initialize_xfer("READ", local, remote, NAME, bytes(300_000))
    target.close()
    for _ in range(3):
        initiator.send_notif(NAME, bytes(300_000))
    with pytest.raises(nixlNotAllowedError, match=f"agent '{NAME}': notification_queue_bytes_max .1000000. "):
        initiator.send_notif(NAME, bytes(300_000))
    with pytest.raises(nixlNotAllowedError, match="notification_queue_bytes_max"):
        initiator.transfer(handle)
    initiator.send_notif(NAME, b"a short one has room")


def test_unfetched_notifications_are_bounded_and_not_lost(pair: tuple[nixl_agent, nixl_agent]) -> None:
    """The target looks after its transfers and never asks for notifications: those beyond wait at their sender. There
    is room for three; one more may come while the core hands one over, which is counted by neither side then."""
    initiator, target = pair
    local, remote, *_ = meet(initiator, target)
    endpoint = target.agent._endpoint
    sent = [message(number) for number in range(5)]
    for text in sent:
        initiator.send_notif("target", text)

    def has_come() -> int:
        endpoint.poll()
        return len(endpoint.inbox._waiting)

    until(lambda: has_come() >= 3)
    finish(initiator, initiator.initialize_xfer("READ", local, remote, "target"))
    assert has_come() in (3, 4)
    assert notifications(target, 5) == {"initiator": sent}
