"""Posts over a transport that only writes down what it is asked: how several transfers are one post."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core
from kvxfer.errors import (
    BlocksBusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    LaneUnavailableError,
    LimitExceededError,
    PeerGoneError,
    TransferCancelledError,
    TransportError,
)
from kvxfer.policy.checksums import carries_checksums
from kvxfer.transport.engine import ROUTES_MAX, Op, RemotePeer, TransferBatch
from kvxfer.types import ChecksumMode, Lane, TransferState
from tests.support.posts_setting import ADDRESS, MANY, PEER_REF, Drained, Setting


def test_committed_once_all_are(setting: Setting) -> None:
    post = setting.poster.start(setting.plan(), notification=b"done", lanes=[Lane.STREAM])
    first, *rest = post.transfer_ids
    assert len(rest) == 2
    assert [asked.notification for asked in setting.transport.asked] == [None] * 3
    assert post.poll() is TransferState.CONNECTING
    for identity in rest:
        setting.finish(identity)
        assert not post.poll().is_final
    with pytest.raises(InvalidArgumentError, match="not over"):
        post.result()
    assert setting.transport.notified == []
    setting.finish(first)
    assert post.poll() is TransferState.COMMITTED
    assert setting.transport.notified == [b"done"]
    assert not post.is_drained
    with pytest.raises(BlocksBusyError, match="used by"):
        setting.poster.deregister(setting.registration)
    setting.drained(post)
    assert post.is_drained
    numbers = post.result()
    assert (numbers.bytes, numbers.elements, numbers.parts, numbers.lane) == (MANY * 16, MANY, 3, Lane.STREAM)
    assert numbers.transfer_us >= numbers.post_us > 0
    plan_s = numbers.post_us / 1e6
    assert numbers.seconds == pytest.approx({"queue": 1e-6, "plan": plan_s, "wire": 2e-6, "confirm": 3e-6})
    assert numbers.attempts == 3
    setting.poster.deregister(setting.registration)
    assert setting.transport.removed == [setting.registration.record.region_id]
    assert setting.poster.records() == ()


def test_a_single_transfer_takes_its_notification_along(setting: Setting) -> None:
    post = setting.poster.start(setting.plan(100), notification=b"done")
    assert [asked.notification for asked in setting.transport.asked] == [b"done"]
    setting.finish(post.transfer_ids[0])
    assert post.poll() is TransferState.COMMITTED
    assert setting.transport.notified == []


def test_the_first_failure_ends_it(setting: Setting) -> None:
    post = setting.poster.start(setting.plan(), notification=b"done")
    first, second, third = post.transfer_ids
    setting.finish(second, TransferState.FAILED, "deadline")
    assert post.poll() is TransferState.FAILED
    assert isinstance(post.error, DeadlineExceededError)
    assert setting.transport.cancelled == [first, third]
    setting.finish(first)
    setting.finish(third, TransferState.CANCELLED, "cancelled")
    assert post.poll() is TransferState.FAILED
    assert setting.transport.notified == []
    with pytest.raises(DeadlineExceededError, match="READ with b"):
        post.result()


def test_cancel(setting: Setting) -> None:
    post = setting.poster.start(setting.plan())
    post.cancel()
    assert setting.transport.cancelled == list(post.transfer_ids)
    for identity in post.transfer_ids:
        setting.finish(identity, TransferState.CANCELLED, "cancelled")
    assert post.poll() is TransferState.CANCELLED
    assert isinstance(post.error, TransferCancelledError)
    count = len(setting.transport.cancelled)
    post.cancel()
    assert len(setting.transport.cancelled) == count


def test_a_notification_that_cannot_be_sent_fails_the_post(setting: Setting) -> None:
    post = setting.poster.start(setting.plan(), notification=b"done")
    setting.transport.notify_error = PeerGoneError("gone")
    for identity in post.transfer_ids:
        setting.finish(identity)
    assert post.poll() is TransferState.FAILED
    assert isinstance(post.error, PeerGoneError)


def test_a_call_that_raises_leaves_nothing_running(setting: Setting) -> None:
    setting.transport.refuse_after = 2
    with pytest.raises(LimitExceededError):
        setting.poster.start(setting.plan())
    assert setting.transport.cancelled == [asked.id for asked in setting.transport.asked]
    (post,) = setting.poster.batches
    assert post.is_final
    assert not post.is_drained
    setting.drained(post, *(asked.id for asked in setting.transport.asked))
    assert setting.poster.batches == ()


def test_an_interrupt_right_after_a_start(setting: Setting) -> None:
    """What has begun is cancelled, and holds the memory until it drained."""

    def interrupt(identity: bytes) -> None:
        if len(setting.transport.asked) == 2:
            raise KeyboardInterrupt

    setting.transport.on_start = interrupt
    with pytest.raises(KeyboardInterrupt):
        setting.poster.start(setting.plan())
    begun = [asked.id for asked in setting.transport.asked]
    assert len(begun) == 2
    assert setting.transport.cancelled == begun
    (post,) = setting.poster.batches
    assert post.is_final
    assert not post.is_drained
    setting.drained(post, *begun)
    assert post.is_drained


def test_an_interrupt_right_before_a_start(setting: Setting) -> None:
    def start(*_: Any) -> None:
        raise KeyboardInterrupt

    setting.transport.prepare_fetch = lambda order: start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        setting.poster.start(setting.plan())
    assert setting.transport.cancelled == []
    assert setting.poster.batches == ()


@pytest.mark.parametrize("fails", ["a part", "the core"])
def test_a_post_that_ends_while_it_is_started(setting: Setting, fails: str) -> None:
    """A signal's handler polls between two parts, and the first has failed: the others are not started."""
    drained: list[TransferBatch] = []

    def fail(identity: bytes) -> None:
        if fails == "the core":
            setting.poster.transfers.fail_all(TransportError("the native core failed"))
            return
        setting.finish(identity, TransferState.FAILED, "transport")
        setting.transport.events.append(Drained(id=identity))
        setting.poster.poll()

    setting.transport.on_start = fail
    post = setting.poster.start(setting.plan(), on_drained=drained.append)
    assert len(setting.transport.asked) == 1
    assert post.poll() is TransferState.FAILED
    assert post.is_drained
    assert drained == [post]
    with pytest.raises(TransportError):
        post.result()
    assert setting.poster.batches == ()


def test_a_post_amid_a_post(setting: Setting) -> None:
    """A signal's handler posts: no id is taken twice, and none is missing."""
    plan, inner = setting.plan(), []

    def post_too(identity: bytes) -> None:
        setting.transport.on_start = lambda identity: None
        inner.append(setting.poster.start(plan, lanes=[Lane.STREAM]))

    for _ in range(40):
        setting.transport.on_start = post_too
        outer = setting.poster.start(plan, lanes=[Lane.STREAM])
        assert len(outer.transfer_ids) == len(inner[-1].transfer_ids) == 3
    begun = [asked.id for asked in setting.transport.asked]
    assert len(set(begun)) == len(begun) == 240


def test_no_two_transfers_have_one_id(setting: Setting) -> None:
    posts = [setting.poster.start(setting.plan(), lanes=[Lane.STREAM]) for _ in range(50)]
    identities = [identity for post in posts for identity in post.transfer_ids]
    assert len(set(identities)) == len(identities) == 150
    assert {len(identity) for identity in identities} == {16}


def test_post_deadline_comes_from_the_call_or_the_config(setting: Setting) -> None:
    plan, poster = setting.plan(1), setting.poster
    poster.start(plan, lanes=[Lane.STREAM])
    poster.start(plan, lanes=[Lane.STREAM], deadline_s=0.5)
    poster.config = dataclasses.replace(poster.config, transfer_deadline_s=7.0)
    poster.start(plan, lanes=[Lane.STREAM])
    assert [asked.timeout_ns for asked in setting.transport.asked] == [120 * 10**9, 5 * 10**8, 7 * 10**9]
    posts = poster.batches
    with pytest.raises(InvalidArgumentError, match="deadline_s"):
        poster.start(plan, lanes=[Lane.STREAM], deadline_s=math.nan)
    assert len(setting.transport.asked) == 3
    assert poster.batches == posts


def test_a_transport_that_broke(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    post = setting.poster.start(setting.plan())
    monkeypatch.setattr(_core, "CoreFailed", types.SimpleNamespace)
    setting.transport.events.append(types.SimpleNamespace(text="a bug", id=b""))
    assert post.poll() is TransferState.FAILED
    assert isinstance(post.error, TransportError)
    assert post.is_drained
    assert len(setting.others) == 1
    with pytest.raises(TransportError, match="a bug"):
        setting.poster.start(setting.plan(10))


def test_other_events_go_on(setting: Setting) -> None:
    event = object()
    setting.finish(b"\0" * 16)  # of no post: there is no handle to tell
    setting.transport.events.append(event)
    setting.poster.poll()
    assert setting.others == [event]


@pytest.mark.parametrize("poller", ["another thread", "a handler of this one"])
def test_drained_before_the_call_that_posted_it_is_over(setting: Setting, poller: str) -> None:
    """A poll meanwhile loses no event of it: by another thread, or by a signal handler within the call."""
    drained: list[TransferBatch] = []
    others: list[threading.Thread] = []

    def poll_at_once(identity: bytes) -> None:
        setting.finish(identity)
        setting.transport.events.append(Drained(id=identity))
        if poller == "another thread":
            others.append(threading.Thread(target=setting.poster.poll))
            others[-1].start()
            others[-1].join(0.1)
        else:
            setting.poster.poll()

    setting.transport.on_start = poll_at_once
    post = setting.poster.start(setting.plan(), on_drained=drained.append, lanes=[Lane.STREAM])
    for other in others:
        other.join(20)
    assert len(post.transfer_ids) == 3
    assert post.poll() is TransferState.COMMITTED
    assert post.is_drained
    assert drained == [post]
    assert setting.others == []


def test_prepared_once_for_all_starts(setting: Setting) -> None:
    plan = setting.plan()
    for _ in range(5):
        setting.poster.start(plan, lanes=[Lane.STREAM])
    assert setting.transport.prepared == 3  # parts
    setting.poster.start(plan, lanes=[Lane.STREAM], wants_checksums=True)
    setting.poster.start(plan, lanes=[Lane.STREAM])
    assert setting.transport.prepared == 6
    assert len(plan.routes) == 2
    for lanes in itertools.permutations([Lane.STREAM, Lane.UNIX, Lane.CMA, Lane.MAPPED]):
        setting.poster.start(plan, lanes=lanes)
        assert len(plan.routes) <= ROUTES_MAX


def test_lanes(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.poster.start(setting.plan(10))
    assert setting.transport.asked[-1].lanes == (Lane.STREAM,)  # numpy's memory cannot be mapped
    with pytest.raises(LaneUnavailableError, match="did not allocate"):
        setting.poster.start(setting.plan(10), lanes=[Lane.MAPPED])
    given = setting.poster.allocate(1 << 16)
    peer = RemotePeer(PEER_REF, ADDRESS, [given.record])
    mine = setting.poster.prepare([(setting.registration.record.address, 64, 0)])
    theirs = setting.poster.prepare([(given.record.address, 64, 0)], peer=peer)
    setting.poster.post(Op.READ, mine, None, theirs, None)
    assert setting.transport.asked[-1].lanes == (Lane.MAPPED, Lane.STREAM)
    setting.poster.post(Op.WRITE, mine, None, theirs, None)  # read by the peer out of numpy's memory
    assert setting.transport.asked[-1].lanes == (Lane.STREAM,)


def test_slow_lane_is_tried_later_when_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    for calibrate, best in ((True, Lane.STREAM), (False, Lane.MAPPED)):
        setting = Setting(monkeypatch, calibrate=calibrate)
        given = setting.poster.allocate(1 << 20)
        peer = RemotePeer(PEER_REF, ADDRESS, [given.record])
        row = [(given.record.address, 1 << 20, 0)]
        plan = setting.poster.plan(
            Op.READ, setting.poster.prepare(row), None, setting.poster.prepare(row, peer=peer), None
        )
        for _ in range(3):
            setting.poster.lanes.measured(PEER_REF, ADDRESS, Lane.MAPPED, 1 << 20, 0.1)
        setting.poster.start(plan)
        assert setting.transport.asked[-1].lanes[0] is best


def test_why_a_lane_was_passed_over(setting: Setting) -> None:
    """By the figures with which the post was started; where the operator's order rules, nothing is."""
    given = setting.poster.allocate(1 << 20)
    peer = RemotePeer(PEER_REF, ADDRESS, [given.record])
    row = [(given.record.address, 1 << 20, 0)]
    plan = setting.poster.plan(Op.READ, setting.poster.prepare(row), None, setting.poster.prepare(row, peer=peer), None)
    lanes = setting.poster.lanes
    for _ in range(3):
        lanes.measured(PEER_REF, ADDRESS, Lane.MAPPED, 1 << 20, (1 << 20) / 1.5e9)
    post = setting.poster.start(plan, lanes=[Lane.MAPPED, Lane.STREAM])
    assert post.statistics().lane_reason == "mapped: possible; stream: possible"
    setting.finish(post.transfer_ids[0])
    assert post.poll() is TransferState.COMMITTED
    for _ in range(30):
        lanes.measured(PEER_REF, ADDRESS, Lane.MAPPED, 1 << 20, 1.0)
    assert post.result().lane_reason == (
        "stream: the source is reached over TCP "
        "(not mapped: possible, measured at 1.5 GB/s where stream is expected at 3.9 GB/s)"
    )
    post = setting.poster.start(plan, lanes=[Lane.STREAM, Lane.MAPPED])
    setting.finish(post.transfer_ids[0])
    assert post.poll() is TransferState.COMMITTED
    assert post.result().lane_reason == "stream: the source is reached over TCP"


def test_sums_are_wanted_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for checksum, wanted in ((ChecksumMode.OFF, False), (ChecksumMode.ON, True)):
        setting = Setting(monkeypatch, post_checksum=checksum)
        setting.poster.start(setting.plan(10))
        setting.poster.start(setting.plan(10), wants_checksums=not wanted)
        assert [asked.wants_checksums for asked in setting.transport.asked] == [wanted, not wanted]
    ids = [number.to_bytes(16, "big") for number in range(4000)]
    sampled = [carries_checksums(ChecksumMode.SAMPLED, identity, is_same_host=True) for identity in ids]
    assert 150 < sum(sampled) < 350
    assert sampled == [carries_checksums(ChecksumMode.SAMPLED, identity, is_same_host=False) for identity in ids]


def test_two_threads_poll(setting: Setting) -> None:
    """Each poll takes the events of all posts; no caller misses the end of its own."""
    posts = [setting.poster.start(setting.plan(100)) for _ in range(20)]

    def poll(mine: list[TransferBatch]) -> None:
        while not all(post.poll().is_final for post in mine):
            pass

    threads = [threading.Thread(target=poll, args=(posts[index::2],)) for index in range(2)]
    for thread in threads:
        thread.start()
    for post in posts:
        setting.finish(post.transfer_ids[0])
    for thread in threads:
        thread.join(20)
    assert all(post.poll() is TransferState.COMMITTED for post in posts)


def test_registrations(setting: Setting) -> None:
    record = setting.registration.record
    assert record.length_bytes == len(setting.memory)
    assert not record.is_shareable
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        setting.poster.register(np.zeros((4, 4))[:, 1])
    other = Setting.__new__(Setting)
    other.registration = setting.poster.register(bytearray(64), can_write=False)
    assert not other.registration.record.can_write
    assert other.registration.record.region_id == record.region_id + 1
    setting.poster.deregister(other.registration)
    with pytest.raises(InvalidArgumentError, match="not registered"):
        setting.poster.deregister(other.registration)


def test_a_plan_is_gone_with_its_last_user(setting: Setting) -> None:
    """No collector is needed: some engines switch it off."""
    gc.disable()
    try:
        for times in (1, 3):
            plan = setting.plan(100)
            for _ in range(times):
                setting.drained(setting.poster.start(plan))
            gone = weakref.ref(plan)
            del plan
            assert gone() is None
    finally:
        gc.enable()
