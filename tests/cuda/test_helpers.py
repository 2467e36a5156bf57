"""What the other tests here ask of their two processes, over the host's memory: needs no device."""

from __future__ import annotations

import pytest

from tests.support.cuda.end import content
from tests.support.cuda.ends import Ends, assert_same

pytestmark = pytest.mark.quick
NBYTES, BLOCK_BYTES = 1 << 20, 4096


def test_a_pull_and_a_post(ends: Ends, transfer: str) -> None:
    source, reader = ends("unix")
    base = source.ask("allocate", name="kv", place="cpu", nbytes=NBYTES, seed=1)
    to = reader.ask("allocate", name="kv", place="cpu", nbytes=NBYTES)
    for end in (source, reader):
        segments = [(0, BLOCK_BYTES, BLOCK_BYTES)]
        end.ask("pool", name="kv", block_bytes=BLOCK_BYTES, blocks=NBYTES // BLOCK_BYTES, segments=segments)
    blocks = list(range(NBYTES // BLOCK_BYTES))
    source.ask("grant", transfer=transfer, blocks=blocks)
    reader.ask("pull", transfer=transfer, blocks=blocks, lanes=["unix"])
    final = reader.ask("wait", transfer=transfer)
    assert (final["state"], final["lane"]) == ("COMMITTED", "unix"), final
    assert_same(reader.bytes("kv"), content(1, NBYTES))
    for end in (source, reader):
        end.ask("remove_pool")

    reader.ask("fill", name="kv", value=0)
    record = source.ask("register", name="kv")
    reader.ask("register", name="kv")
    rows = [[(at, BLOCK_BYTES, 0, len(blocks), BLOCK_BYTES)] for at in (to, base)]
    number = reader.ask("post", op="READ", near=rows[0], far=rows[1], records=[record], lane="unix")
    final = reader.ask("finish", number=number)
    assert (final["state"], final["lane"]) == ("COMMITTED", "unix"), final
    assert_same(reader.bytes("kv"), content(1, NBYTES))
