"""SGLang's own use of NIXL on `kvxfer nixl`: its transfer backend `nixl`, two processes, bytes compared; and its
storage of pages in NIXL's storage plugins, of which there are none.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.sglang.pair import ENVIRONMENT, Contender, Pair, SideFailed
from tests.support.sglang.side import MEMORY_KIND, Shape

DROP_IN = (sys.executable, "-m", "kvxfer.cli", "nixl", "--")
SHAPE = Shape(layers=3, heads=2, dim=16, tokens=16, pages=64)
HEARTBEAT_S = 2.0
"""SGLang asks for the health of a prefill engine so often (at least), and takes it for dead when it missed twice."""
GONE_S = 3 * HEARTBEAT_S + 2.0


def started(directory: pathlib.Path, model: pathlib.Path, kind: str) -> Pair:
    """``kind``: what SGLang takes the pages' memory for."""
    (directory / "model").symlink_to(model)
    environment = {MEMORY_KIND: kind, "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_S)}
    return Pair(Contender(kind, "nixl", environment, (), DROP_IN), sys.executable, directory, SHAPE)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> Iterator[dict[str, Pair]]:
    """By the kind of memory; they import all at once."""
    pairs = {kind: started(tmp_path_factory.mktemp(kind), model, kind) for kind in ("DRAM", "VRAM")}
    try:
        yield pairs
    finally:
        for pair in pairs.values():
            pair.end()


@pytest.fixture(scope="module")
def pair(pairs: dict[str, Pair]) -> Pair:
    pairs["DRAM"].begin()
    return pairs["DRAM"]


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 0), (16, 0), (17, 0), (700, 0), (700, 8)])
def test_pages_and_row_arrive(pair: Pair, tokens: int, chunk: int) -> None:
    for seed in range(3):
        pair.move(pair.request(tokens, seed, chunk))  # compares every byte


def test_it_says_so_when_prefill_dies(pair: Pair) -> None:
    """Last of those that need the pair."""
    under_way_s, why = pair.lose_prefill()
    assert under_way_s < GONE_S
    assert "KVTransferError" in why


def test_pages_that_it_takes_for_a_devices_are_refused(pairs: dict[str, Pair]) -> None:
    with pytest.raises(SideFailed, match="nixlBackendError"):
        pairs["VRAM"].begin()


STORAGE = """
import os, sys
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl import hicache_nixl

assert hicache_nixl.nixl_agent.__module__ == "kvxfer.connectors.nixl.api"
for plugin in ("POSIX", "GDS", "OBJ", "auto"):
    os.environ["SGLANG_HICACHE_NIXL_BACKEND_PLUGIN"] = plugin
    try:
        hicache_nixl.HiCacheNixl(
            HiCacheStorageConfig(
                tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
                enable_storage_metrics=False, is_page_first_layout=False, model_name="m",
            ),
            sys.argv[1],
        )
    except RuntimeError as error:
        print(plugin, error, flush=True)
os._exit(0)
"""


def test_storage_plugins_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    paths = os.pathsep.join(filter(None, (str(pathlib.Path(__file__).parent / "stubs"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*DROP_IN, sys.executable, "-c", STORAGE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} Failed to create NIXL backend" for name in ("POSIX", "GDS", "OBJ", "auto")
    ]
    for name in ("POSIX", "GDS", "OBJ"):
        assert f"Backend {name} not available in plugins" in done.stderr
