"""A prefill engine's weights are changed while prompts wait there: they fail at once, by that name, and what was sent
before is received.
"""

from __future__ import annotations

from tests.support.sglang.ranks import FAILED, SUCCESS, World, reason, send, start, wait, wait_for


def test_prompts_that_wait_fail_when_weights_change(world: World) -> None:
    before, waiting, half = world.room(), world.room(), world.room()
    senders = [world.prefill.sender(room) for room in (before, waiting, half)]
    rooms = enumerate((before, waiting, half), 4)
    receivers = [world.decode.ask(room, [2 * number, 2 * number + 1], number) for number, room in rooms]
    start(senders[0], 2, 0)
    send(senders[0], [1, 3])
    wait_for(receivers[0], SUCCESS)
    start(senders[2], 2, 1)
    send(senders[2], [2])
    world.prefill.manager.weights.forget("SGLang changed the weights in memory (update_weights_from_disk)")
    for side in (*senders[1:], *receivers[1:]):
        wait(lambda: side.poll() == FAILED, 1.0)  # noqa: B023
        said = reason(side)
        assert "weights_unknown" in said
        assert "update_weights_from_disk" in said
    wait_for(senders[0], SUCCESS)
