"""Engines that find each other by a coordinator: no agent metadata travels."""

from __future__ import annotations

import pathlib

from kvxfer.types import Role
from tests.support.sglang_core.coordinator import coordinator
from tests.support.sglang_core.cores import Copy, Rank, check, idle, open_room, options, running


def test_ranks_find_each_other_by_a_coordinator(tmp_path: pathlib.Path) -> None:
    token_file = pathlib.Path(options(tmp_path).token_file)
    with coordinator(token_file) as address:
        chosen = options(tmp_path, coordinator=address)
        p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
        with running(p, d):
            assert p.core.export_metadata() == ""
            p.write(p.kv, (7, 8), 1)
            p.write(p.aux, (0,), 1)
            open_room(p, d, 5, (1, 2), 0)
            p.sources.send(5, 0, (7, 8), is_last=True, aux_row=0)
            d.wait("done", 5)
            p.wait("sent", 5)
            check(p, d, Copy(((7, 8), (1, 2)), ((0,), (0,))))
            idle(p, d)
