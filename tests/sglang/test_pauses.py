"""What this backend's hooks in SGLang's real classes make of a paused engine."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang import plugin
from tests.support.sglang.ranks import BOOTSTRAPPING, SUCCESS, World, give, send, start, wait_for


class Scheduler:
    """As far as the hooks look at SGLang's."""

    def __init__(self) -> None:
        self._engine_paused = False
        self.handled: list[Any] = []

    def come_round(self, *requests: Any) -> None:
        """One turn of its loop."""
        from kvxfer.connectors.sglang import hooks_0_5_23 as hooks

        hooks.take_in(lambda scheduler, kept: scheduler.handled.extend(kept), self, list(requests))
        hooks.come_round(None, self)


def test_each_turn_of_a_scheduler_is_seen(world: World) -> None:
    from sglang.srt.managers.scheduler import Scheduler as Real

    assert {Real.ingest_requests.__wrapped__.__name__, Real.process_input_requests.__wrapped__.__name__} == {
        "ingest_requests",
        "process_input_requests",
    }


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_is_told_to_readers_in_each_mode(world: World, mode: str) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    pulses, scheduler = world.prefill.manager.core.pulses, Scheduler()
    scheduler.come_round()
    assert not pulses.is_paused
    scheduler._engine_paused = mode != "abort"  # SGLang's own handling of the other two
    pause, go_on = PauseGenerationReqInput(mode=mode), ContinueGenerationReqInput()
    scheduler.come_round(pause)
    assert scheduler.handled == ([] if mode == "abort" else [pause]), "SGLang's scheduler does not know mode abort"
    scheduler.come_round()
    assert pulses.is_paused
    assert not world.decode.manager.core.pulses.is_paused
    scheduler._engine_paused = False
    scheduler.come_round(go_on)
    assert not pulses.is_paused
    assert scheduler.handled[-1] is go_on


def test_the_front_of_a_prefill_engine_tells_its_schedulers_of_each_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    arguments = SimpleNamespace(disaggregation_transfer_backend="kvxfer", disaggregation_mode="prefill")
    monkeypatch.setattr("sglang.srt.arg_groups.overrides.resolving_view", lambda given: given)
    plugin.check_first(arguments)

    async def told(mode: str) -> list[Any]:
        sent: list[Any] = []

        async def dispatch(request: Any) -> None:
            sent.append(request.mode)

        async def is_locked() -> bool:
            return False

        front = SimpleNamespace(
            is_pause_cond=asyncio.Condition(),
            is_pause=False,
            _async_dispatch_to_scheduler=dispatch,
            abort_request=lambda abort_all: None,
            model_update_lock=SimpleNamespace(is_locked=is_locked),
        )
        await TokenizerManager.pause_generation(front, PauseGenerationReqInput(mode=mode))
        assert front.is_pause
        return sent

    for mode in ("in_place", "retract", "abort"):
        assert asyncio.run(told(mode)) == [mode]


def test_a_room_of_a_paused_engine_is_sent_after_it(world: World) -> None:
    """The decode engine has asked for the prompt, which comes to prefill's scheduler only after the pause."""
    scheduler, room = Scheduler(), world.room()
    scheduler._engine_paused = True
    scheduler.come_round()
    receiver = world.decode.receiver(room)
    world.decode.greet(receiver)
    give(receiver, [40, 41], 2)
    for _ in range(60):  # longer than the prompt may be unknown without a pause
        scheduler.come_round()
        assert receiver.poll() > BOOTSTRAPPING
        time.sleep(0.05)
    scheduler._engine_paused = False
    scheduler.come_round()
    sender = world.prefill.sender(room)
    start(sender, 2, 1)
    send(sender, [1, 2])
    wait_for(receiver, SUCCESS)
    wait_for(sender, SUCCESS)
    sender.clear()
    receiver.clear()
