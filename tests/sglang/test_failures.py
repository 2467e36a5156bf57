"""What fails: told to both sides with a reason, soon, and without a byte of it in pages that are used anew."""

from __future__ import annotations

import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.errors import WeightsUnknownError
from tests.support.sglang.ranks import (
    BOOTSTRAP_S,
    BOOTSTRAPPING,
    FAILED,
    LAYERS,
    POISON,
    SUCCESS,
    WAITING,
    World,
    give,
    make_model,
    reason,
    send,
    start,
    wait,
    wait_for,
)

TOLD_S = 1.0
"""So soon one side hears of what the other did."""


def fails(side: object, within_s: float) -> str:
    wait(lambda: side.poll() == FAILED, within_s)
    return reason(side)


@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
def test_abort_at_prefill(world: World, state: str) -> None:
    world.decode.poison()
    room = world.room()
    sender = world.prefill.sender(room)
    receiver = world.decode.receiver(room)
    world.decode.greet(receiver)
    if state != "bootstrapping":
        give(receiver, [50, 51], 3)
        start(sender, 2, 0)
    if state == "transferring":
        send(sender, [1])
        time.sleep(0.2)
    sender.abort()
    assert sender.poll() == FAILED
    assert "Aborted" in reason(sender)
    if state == "bootstrapping":
        give(receiver, [50, 51], 3)
    assert "Aborted" in fails(receiver, TOLD_S)
    assert world.decode.manager.is_abort_release_safe(room, 1)
    assert all((array[3] == POISON).all() for array in world.decode.aux)


@pytest.mark.parametrize("state", ["bootstrapping", "waiting", "transferring"])
def test_abort_at_decode(world: World, state: str) -> None:
    world.decode.poison()
    room = world.room()
    sender = world.prefill.sender(room)
    receiver = world.decode.receiver(room)
    world.decode.greet(receiver)
    if state != "bootstrapping":
        give(receiver, [50, 51], 3)
        start(sender, 2, 0)
    if state == "transferring":
        send(sender, [1])
        time.sleep(0.2)
    receiver.abort()
    assert "Aborted" in fails(receiver, TOLD_S)
    assert world.decode.manager.is_abort_release_safe(room, 1)
    assert "gave it up" in fails(sender, TOLD_S)
    before = [array.copy() for array in world.decode.kv]
    time.sleep(0.2)
    assert all(map(np.array_equal, before, world.decode.kv))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_abort_at_decode_before_it_introduced_itself(world: World, is_known: bool, is_first: bool) -> None:
    """``is_known``: an earlier room introduced the two engines. ``is_first``: the prompt comes to prefill later."""
    decode = world.decode if is_known else world.rank("decode")
    if is_known:
        decode.greet(decode.receiver(world.room()))
    room = world.room()
    sender = None if is_first else world.prefill.sender(room)
    receiver = decode.receiver(room)
    receiver.abort()
    assert "Aborted" in fails(receiver, TOLD_S)
    if sender is None:
        wait(lambda: room in world.prefill.manager.prefill_side._over, TOLD_S)
        sender = world.prefill.sender(room)
    assert "gave it up" in fails(sender, TOLD_S)
    receiver.abort()
    receiver.clear()
    sender.clear()
    again = decode.ask(world.room(), [50], 3)
    assert again.poll() == WAITING, "the farewell did no harm to rooms that come later"
    again.abort()


def test_a_failure_is_told_once_no_page_is_touched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    room = world.room()
    receiver = world.decode.ask(room, [50], 3)
    with monkeypatch.context() as patch:
        patch.setattr(world.decode.manager.core.destinations, "is_drained", lambda room: False)
        receiver.abort()
        assert receiver.poll() == WAITING
        assert not world.decode.manager.is_abort_release_safe(room, 1)
        other = world.decode.receiver(room)
        assert "in use" in reason(other)
    assert "Aborted" in fails(receiver, TOLD_S)
    assert world.decode.manager.is_abort_release_safe(room, 1)


def test_abort_after_the_end_changes_nothing(world: World) -> None:
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    start(sender, 1, 1)
    send(sender, [5])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    receiver.clear()
    sender.clear()
    receiver.abort()
    sender.abort()
    assert room not in world.prefill.manager.request_status
    assert room not in world.decode.manager.request_status


def test_no_decode_engine_comes(world: World) -> None:
    sender = world.prefill.sender(world.room())
    assert "timed out" in fails(sender, BOOTSTRAP_S + 1)


@pytest.mark.parametrize("is_busy", [True, False])
def test_no_prompt_comes(world: World, is_busy: bool) -> None:
    """Whether the prefill engine has other requests, or nothing to do."""
    receiver = world.decode.ask(world.room(), [5], 1)
    other = world.prefill.sender(world.room()) if is_busy else None
    began_s = time.monotonic()
    while receiver.poll() != FAILED:
        if other is not None:
            other.poll()
        assert time.monotonic() - began_s < 5
        time.sleep(0.01)
    assert "grant_unknown" in reason(receiver)
    if other is not None:
        other.abort()


def test_a_room_in_use_is_refused_on_both_sides(world: World) -> None:
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    for other in (world.prefill.sender(room), world.decode.receiver(room)):
        assert other.poll() == FAILED
        assert "in use" in reason(other)
        other.abort()
        other.clear()
    third = world.rank("decode")
    assert "in use" in fails(third.ask(room, [6], 2), TOLD_S)
    start(sender, 1, 4)
    send(sender, [9])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    assert np.array_equal(world.decode.kv[0][5], world.prefill.kv[0][9])
    sender.clear()
    receiver.clear()
    again = world.prefill.sender(room)
    assert again.poll() == BOOTSTRAPPING
    again.abort()


def test_another_cluster_token_is_refused(world: World, tmp_path: pathlib.Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    outsider = world.rank("decode", environment={"KVXFER_SGLANG_TOKEN_FILE": str(token)})
    receiver = outsider.receiver(world.room())
    outsider.greet(receiver)
    assert receiver.poll() == FAILED
    assert "another cluster token" in reason(receiver)


def test_mismatch_between_engines_is_named(world: World, tmp_path: pathlib.Path) -> None:
    others = {
        "aux_item_lens": world.rank("decode", aux_bytes=(64, 64, 256)),
        "head_bytes": world.rank("decode", kv_item_lens=[128] * 2 * LAYERS),
        "shape is 'known' here and 'not known' there": world.rank("decode", kv_layout="another"),
        "weights_fingerprint": world.rank("decode", model=make_model(tmp_path / "w", b"others!")),
        "config.rope_parameters.rope_theta is '10000.0' here and '5.0' there": world.rank(
            "decode", model=make_model(tmp_path / "c", rope_theta=5.0)
        ),
    }
    for field, other in others.items():
        room = world.room()
        sender, receiver = world.prefill.sender(room), other.receiver(room)
        other.greet(receiver)
        text = reason(receiver) if receiver.poll() == FAILED else ""
        assert field in text
        assert field in fails(sender, TOLD_S)
        sender.clear()
        assert " here" in text
        assert " there" in text


def test_ranks_that_cannot_be_paired_are_named_and_break_nothing(world: World) -> None:
    other = world.rank("decode", tp=2, kv_layout="another")
    receiver = other.receiver(world.room())
    wait(lambda: other.manager.try_ensure_parallel_info(world.address) or receiver.poll() == FAILED)
    assert receiver.poll() == FAILED
    assert "attn_tp_size is 2 here and 1 there" in reason(receiver)


def test_weights_that_will_never_be_known_are_refused_at_start(world: World, tmp_path: pathlib.Path) -> None:
    bare = make_model(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    before = set(threading.enumerate())
    with pytest.raises(WeightsUnknownError, match=r"has no weight files\. An engine of SGLang"):
        world.rank("decode", model=bare)
    wait(lambda: not set(threading.enumerate()) - before)


def test_changed_weights_are_refused(world: World) -> None:
    other = world.rank("decode")
    other.manager.weights.forget("SGLang changed the weights in memory (update_weights_from_disk)")
    room = world.room()
    sender, receiver = world.prefill.sender(room), other.receiver(room)
    wait(lambda: other.manager.try_ensure_parallel_info(world.address))
    receiver.init(0)
    assert receiver.poll() == FAILED
    assert "update_weights_from_disk" in reason(receiver)
    assert "update_weights_from_disk" in fails(sender, TOLD_S), "once prefill has sent its metadata"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address with a listener that never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_address_delays_no_other_room(world: World, silent: str) -> None:
    """Neither the scheduler's thread nor what it does for others, until that room has failed."""
    manager, slowest_s = world.decode.manager, 0.0
    receiver = world.decode.receiver(world.room(), silent)
    began_s, done = time.monotonic(), 0
    while receiver.poll() != FAILED:
        assert time.monotonic() - began_s < 3.5
        asked_s = time.monotonic()
        assert not manager.try_ensure_parallel_info(silent)
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        room = world.room()
        sender, other = world.prefill.sender(room), world.decode.ask(room, [5], 1)
        start(sender, 1, 1)
        send(sender, [5])
        wait_for(other, SUCCESS)
        wait_for(sender, SUCCESS)
        sender.clear()
        other.clear()
        done += 1
    assert f"no prefill engine answers at {silent}" in reason(receiver)
    assert slowest_s < 0.05
    assert done > 10


def test_an_engine_that_answers_is_known_at_once(world: World) -> None:
    """SGLang's queue looks once a second, and again when there is an answer."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    world.decode.manager.forget(world.address)
    queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.kv_manager, queue._max_ensure_retries, queue._ensure_retry_interval = world.decode.manager, 15, 60.0
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    wait(lambda: queue._ensure_prefill_info({world.address: ["a room"]})[0])


def test_a_prefill_engine_that_comes_back_is_found(world: World) -> None:
    receiver = world.decode.ask(world.room(), [5], 1)
    world.prefill.stop()
    world.prefill = world.rank("prefill")
    assert fails(receiver, 3.0)
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    start(sender, 1, 1)
    send(sender, [5])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    sender.clear()
    receiver.clear()


def test_a_room_that_waits_stays_so(world: World) -> None:
    room = world.room()
    sender, receiver = world.prefill.sender(room), world.decode.ask(room, [5], 1)
    wait_for(sender, WAITING)
    for _ in range(60):
        assert sender.poll() == receiver.poll() == WAITING
        time.sleep(0.05)
    sender.abort()
    fails(receiver, TOLD_S)
