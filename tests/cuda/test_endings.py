"""What ends amid its bytes commits nothing, and nothing of it lands later: two processes, memory on a CUDA device."""

from __future__ import annotations

import secrets
import time

from tests.support.cuda.end import POISON, content
from tests.support.cuda.ends import DEVICE, EndProcess, Ends, assert_same, each_lane, needs_device, poison

pytestmark = needs_device
BLOCKS, BLOCK_BYTES = 4096, 64 << 10
NBYTES = BLOCKS * BLOCK_BYTES
OTHERS = 0x5A
"""What the source writes into its blocks as soon as their grant has ended."""


def prepare(source: EndProcess, reader: EndProcess) -> None:
    source.ask("allocate", name="kv", place=DEVICE, nbytes=NBYTES, seed=1)
    reader.ask("allocate", name="kv", place=DEVICE, nbytes=NBYTES)
    for end in (source, reader):
        segments = [(0, BLOCK_BYTES, BLOCK_BYTES)]
        end.ask("pool", name="kv", block_bytes=BLOCK_BYTES, blocks=BLOCKS, segments=segments)


@each_lane
def test_a_grant_that_ends_amid_the_bytes(ends: Ends, lane: str) -> None:
    """Bytes of the source's next owner are in no transfer that committed, and nothing lands once it has drained."""
    source, reader = ends(lane)
    prepare(source, reader)
    blocks, sent, whole_s = list(range(BLOCKS)), content(1, NBYTES), 0.0
    for _ in range(2):  # the second is as fast as all later ones
        transfer = secrets.token_hex(16)
        source.ask("grant", transfer=transfer, blocks=blocks)
        reader.ask("pull", transfer=transfer, blocks=blocks, lanes=[lane])
        final = reader.ask("wait", transfer=transfer)
        assert (final["state"], final["lane"]) == ("COMMITTED", lane), final
        whole_s = final["seconds"]
    assert_same(reader.bytes("kv"), sent)
    for number in range(10):
        source.ask("fill", name="kv", seed=1)
        reader.ask("fill", name="kv", value=POISON)
        transfer = secrets.token_hex(16)
        is_whole = number % 2 == 0  # of every second grant the last block never becomes ready: it cannot be too late
        source.ask("grant", transfer=transfer, blocks=blocks, ready=BLOCKS if is_whole else BLOCKS - 1)
        reader.ask("pull", transfer=transfer, blocks=blocks, lanes=[lane])
        after_s = whole_s * number / 10
        source.start("revoke_and_fill", transfer=transfer, after_s=after_s, name="kv", value=OTHERS)
        final = reader.ask("wait", transfer=transfer)
        source.finish()
        if final["state"] == "COMMITTED":
            assert is_whole
            assert_same(reader.bytes("kv"), sent)
            continue
        assert (final["state"], final["code"]) == ("FAILED", "grant_revoked"), final
        reader.ask("fill", name="kv", value=POISON)
        time.sleep(0.05)
        assert_same(reader.bytes("kv"), poison(NBYTES))
    for end in (reader, source):
        end.ask("remove_pool")


@each_lane
def test_a_source_that_is_killed_amid_the_bytes(ends: Ends, lane: str) -> None:
    """The reader is told, has its blocks back, and takes its pool back."""
    source, reader = ends(lane)
    prepare(source, reader)
    blocks = list(range(BLOCKS))
    transfer = secrets.token_hex(16)
    source.ask("grant", transfer=transfer, blocks=blocks, ready=BLOCKS // 2)  # so it cannot be over before
    reader.ask("pull", transfer=transfer, blocks=blocks, lanes=[lane])
    source.process.kill()
    final = reader.ask("wait", transfer=transfer)
    assert final["state"] == "FAILED", final
    reader.ask("fill", name="kv", value=POISON)
    time.sleep(0.05)
    assert_same(reader.bytes("kv"), poison(NBYTES))
    reader.ask("remove_pool")
