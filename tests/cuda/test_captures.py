"""Transfers while the reader's engine captures a CUDA graph, in the mode that torch has by default: two processes,
memory on a CUDA device."""

from __future__ import annotations

from tests.support.cuda.end import content
from tests.support.cuda.ends import DEVICE, Ends, assert_same, each_lane, needs_device

pytestmark = needs_device
BLOCKS, BLOCK_BYTES = 4096, 16 << 10
NBYTES = BLOCKS * BLOCK_BYTES


@each_lane
def test_a_pull_beside_a_capture(ends: Ends, transfer: str, lane: str) -> None:
    """Both come through: the graph, and every byte."""
    source, reader = ends(lane)
    source.ask("allocate", name="kv", place=DEVICE, nbytes=NBYTES, seed=1)
    reader.ask("allocate", name="kv", place=DEVICE, nbytes=NBYTES)
    for end in (source, reader):
        segments = [(0, BLOCK_BYTES, BLOCK_BYTES)]
        end.ask("pool", name="kv", block_bytes=BLOCK_BYTES, blocks=BLOCKS, segments=segments)
    blocks = list(range(BLOCKS))
    source.ask("grant", transfer=transfer, blocks=blocks, ready=BLOCKS - 1)
    reader.ask("pull", transfer=transfer, blocks=blocks, lanes=[lane])
    source.start("capture", for_s=1.0)
    assert reader.ask("capture", for_s=1.0) > 0
    assert source.finish() > 0
    source.ask("ready", transfer=transfer, count=BLOCKS)
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["lane"]) == ("COMMITTED", lane), final
    assert_same(reader.bytes("kv"), content(1, NBYTES))
    for end in (reader, source):
        end.ask("remove_pool")
