"""A prefix that is longer than vLLM's primary tier: as much of it comes back as there is room for, again and again.
Without the tier's help vLLM brings nothing of it back: each block takes the row of one before it.
"""

from __future__ import annotations

import pathlib

from tests.support.vllm.tiered import BLOCK_TOKENS, ROW, Driven, files, prompt

BLOCKS, ROWS = 40, 20
"""Of the prompt, and of the primary tier."""
TOKENS = BLOCKS * BLOCK_TOKENS + 5
LLM = {
    **{"max_model_len": (BLOCKS + 4) * BLOCK_TOKENS, "block_size": BLOCK_TOKENS, "max_num_seqs": 4},
    **{"num_gpu_blocks_override": BLOCKS + 10, "max_num_batched_tokens": 8 * BLOCK_TOKENS},
}


def ask(engine: Driven, seed: int) -> tuple[list[int], int]:
    answer = engine.ask("generate", ids=prompt(seed, TOKENS), n=4)
    return answer["tokens"], answer["cached"]


def test_of_a_prefix_longer_than_the_primary_tier_a_part_comes_back(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path
) -> None:
    (tmp_path / "store").mkdir()
    tier = {"store": "file", "path": str(tmp_path / "store"), "capacity_bytes": 1 << 30}
    large = Driven(tiny_model, tier, tmp_path / "large.log", llm=LLM, cpu_bytes=(BLOCKS + 8) * ROW).wait_ready()
    try:
        wanted, cached = ask(large, 1)
        assert cached == 0
        assert len(files(tmp_path / "store")) == BLOCKS
    finally:
        large.end()
    small = Driven(tiny_model, tier, tmp_path / "small.log", llm=LLM, cpu_bytes=ROWS * ROW).wait_ready()
    try:
        for time in range(3):
            tokens, cached = ask(small, 1)
            assert tokens == wanted
            assert cached >= BLOCK_TOKENS * ROWS // 2, f"{cached} the {time + 1}. time"
            ask(small, 100 + time)  # pushes it out of the device's cache
        assert small.errors() == {}
        whole = next(path for path in files(tmp_path / "store"))
        whole.write_bytes(whole.read_bytes()[:100])
        assert ask(small, 1)[0] == wanted
    finally:
        small.end()
