"""The paged forward pass against transformers' own ``generate``, token by token and byte by byte."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvxfer.engine.model import LoadedModel
from kvxfer.engine.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from kvxfer.engine.runner import Chunk, Runner
from kvxfer.errors import InvalidArgumentError

GAP_MIN = 1e-3
"""A divergence is excused only where the reference itself hardly prefers its token."""
BLOCK = 16
USER_CACHE = default_cache_dir()
"""Taken at import: within tests every XDG directory is a private one."""
EDGES = [*range(1, 36), 47, 48, 49, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 299, 300]


@dataclasses.dataclass
class Run:
    """One sequence of a test: its tokens, its blocks and how far its KV is computed."""

    tokens: list[int]
    table: list[int]
    done: int = 0

    def chunk(self, size: int | None = None) -> Chunk:
        end = len(self.tokens) if size is None else min(self.done + size, len(self.tokens))
        made = Chunk(self.tokens[self.done : end], self.done, self.table, end == len(self.tokens))
        self.done = end
        return made


def prompt_of(model: LoadedModel, length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(3, model.vocab_size), k=length)


def table_of(runner: Runner, length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(runner.block_count), -(-length // runner.block_tokens))


def poisoned(model: LoadedModel, block_count: int = 64) -> Runner:
    """A runner whose pool is all NaN: whatever is read without having been written shows."""
    storage = torch.full((block_count, model.block_bytes(BLOCK)), 0xFF, dtype=torch.uint8)
    return Runner(model, storage, block_count=block_count, block_tokens=BLOCK)


def advance(runner: Runner, sequences: Sequence[Run], size: int | None = None) -> None:
    """One step for all; greedy tokens are appended to the sequences that got logits."""
    chunks = [sequence.chunk(size) for sequence in sequences]
    logits = runner.forward(chunks)
    asked = [sequence for sequence, chunk in zip(sequences, chunks, strict=True) if chunk.need_logits]
    assert logits.shape == (len(asked), runner.model.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    for sequence, row in zip(asked, logits, strict=True):
        sequence.tokens.append(int(row.argmax()))


def generate(runner: Runner, prompt: list[int], count: int, *, size: int | None = None, seed: int = 0) -> list[int]:
    sequence = Run(list(prompt), table_of(runner, len(prompt) + count, seed))
    while len(sequence.tokens) < len(prompt) + count:
        advance(runner, [sequence], size)
    return sequence.tokens[len(prompt) :]


def reference(model: LoadedModel, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, and by how much each was preferred to the next best."""
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    made = model.module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    best = [step[0].topk(2).values for step in made.logits]
    return made.sequences[0, len(prompt) :].tolist(), [float(first - second) for first, second in best]


def check_equal(model: LoadedModel, prompt: list[int], got: list[int]) -> None:
    check_same(prompt, got, *reference(model, prompt, len(got)))


def check_same(prompt: list[int], got: list[int], expected: list[int], gaps: list[float]) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            assert gaps[index] < GAP_MIN, f"{len(prompt)} tokens: {got} is not {expected} at {index}, gap {gaps[index]}"
            return


def test_greedy_tokens_equal_transformers_for_many_lengths(tiny_model: LoadedModel) -> None:
    runner = poisoned(tiny_model)
    for length in EDGES:
        prompt = prompt_of(tiny_model, length)
        check_equal(tiny_model, prompt, generate(runner, prompt, 12, seed=length))


@pytest.mark.parametrize("size", [1, 7, 16, 33, 128])
def test_chunked_prefill_equals_whole(tiny_model: LoadedModel, size: int) -> None:
    for length in (1, 15, 16, 17, 100, 300):
        prompt = prompt_of(tiny_model, length)
        check_equal(tiny_model, prompt, generate(poisoned(tiny_model), prompt, 12, size=size))


def test_a_late_chunk_longer_than_a_mask_tile(tiny_model: LoadedModel) -> None:
    runner, prompt = poisoned(tiny_model, 128), prompt_of(tiny_model, 900)
    sequence = Run(list(prompt), table_of(runner, 920))
    advance(runner, [sequence], 5)
    while len(sequence.tokens) < 912:
        advance(runner, [sequence], 1000)
    check_equal(tiny_model, prompt, sequence.tokens[900:])


def test_eight_at_once_joining_at_different_times(tiny_model: LoadedModel) -> None:
    runner = poisoned(tiny_model, 160)
    lengths = [1, 16, 17, 40, 41, 100, 250, 300]
    blocks = iter(random.Random(0).sample(range(160), 160))
    waiting = [
        Run(prompt_of(tiny_model, length), [next(blocks) for _ in range(-(-(length + 24) // BLOCK))])
        for length in lengths
    ]
    running: list[Run] = []
    while waiting or any(len(one.tokens) < n + 12 for one, n in zip(running, lengths, strict=False)):
        if waiting:
            running.append(waiting.pop(0))
        going = [one for one, length in zip(running, lengths, strict=False) if len(one.tokens) < length + 12]
        random.Random(len(going)).shuffle(going)
        advance(runner, going, 64)
    for sequence, length in zip(running, lengths, strict=True):
        check_equal(tiny_model, sequence.tokens[:length], sequence.tokens[length:])


def test_kv_equals_transformers_cache_position_by_position(tiny_model: LoadedModel) -> None:
    runner, prompt = poisoned(tiny_model), prompt_of(tiny_model, 75)
    table = table_of(runner, 75)
    runner.forward([Chunk(prompt[:40], 0, table, False)])
    assert runner.forward([Chunk(prompt[40:], 40, table, False)]).shape == (0, tiny_model.vocab_size)
    with torch.inference_mode():
        cache = tiny_model.module(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer in range(tiny_model.layers):
        for side, expected in enumerate((cache.layers[layer].keys[0], cache.layers[layer].values[0])):
            blocks = runner.kv[table, layer, side]
            got = blocks.transpose(0, 1).reshape(tiny_model.kv_heads, -1, tiny_model.head_dim)[:, :75]
            assert torch.allclose(got, expected, rtol=1e-5, atol=2e-5)


def test_only_the_named_positions_are_written(tiny_model: LoadedModel) -> None:
    runner = poisoned(tiny_model)
    tables = [table_of(runner, 80, 1)]
    tables.append([block for block in range(64) if block not in tables[0]][:5])
    runner.forward([Chunk(prompt_of(tiny_model, 40), 0, table, False) for table in tables])
    before = runner.kv.clone()
    runner.forward([Chunk(prompt_of(tiny_model, 21), 40, tables[0], True), Chunk([5], 40, tables[1], True)])
    written = torch.zeros(64, BLOCK, dtype=torch.bool)
    for table, start, end in ((tables[0], 40, 61), (tables[1], 40, 41)):
        for position in range(start, end):
            written[table[position // BLOCK], position % BLOCK] = True
    same = (runner.kv.view(torch.int32) == before.view(torch.int32)).permute(0, 4, 1, 2, 3, 5).flatten(2)
    assert same[~written].all()
    assert not same[written].any()


def test_a_shared_prefix_serves_another_sequence(tiny_model: LoadedModel) -> None:
    runner, prompt = poisoned(tiny_model), prompt_of(tiny_model, 64)
    first = table_of(runner, 64, 3)
    own = [block for block in range(64) if block not in first][:3]
    runner.forward([Chunk(prompt, 0, first, False)])
    second = prompt[:48] + prompt_of(tiny_model, 20, seed=5)
    sequence = Run(list(second), first[:3] + own, done=48)
    while len(sequence.tokens) < len(second) + 8:
        advance(runner, [sequence])
    check_equal(tiny_model, second, sequence.tokens[len(second) :])


def test_a_corrupted_block_changes_the_tokens(tiny_model: LoadedModel) -> None:
    changed = 0
    for seed in range(8):
        runner, prompt = poisoned(tiny_model), prompt_of(tiny_model, 60, seed)
        sequence = Run(list(prompt), table_of(runner, 80))
        runner.forward([Chunk(prompt[:-1], 0, sequence.table, False)])
        sequence.done = 59
        runner.kv[sequence.table[1]] = runner.kv[sequence.table[2]]
        while len(sequence.tokens) < 72:
            advance(runner, [sequence])
        changed += sequence.tokens[60:] != reference(tiny_model, prompt, 12)[0]
    assert changed == 8


def test_storage_from_outside_is_written_in_place(tiny_model: LoadedModel) -> None:
    array = np.zeros((8, tiny_model.block_bytes(BLOCK)), np.uint8)
    runner = Runner(tiny_model, torch.from_numpy(array), block_count=8, block_tokens=BLOCK)
    runner.forward([Chunk([5, 6, 7], 0, [3], False)])
    assert array[3].any()
    assert not np.delete(array, 3, axis=0).any()


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk([], 0, [0], True), "needs tokens"),
        (Chunk([5], -1, [0], True), "start from 0"),
        (Chunk([5], 2048, list(range(64)) * 3, True), "context of 2048"),
        (Chunk([5], 16, [0], True), "do not hold 17"),
        (Chunk([5], 0, [64], True), "outside 0 to 63"),
        (Chunk([5], 0, [-1], True), "outside 0 to 63"),
        (Chunk([512], 0, [0], True), "token id"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_before_any_write(
    tiny_model: LoadedModel, chunk: Chunk, words: str
) -> None:
    runner = poisoned(tiny_model)
    with pytest.raises(InvalidArgumentError, match=words):
        runner.forward([Chunk([5, 6], 0, [1], True), chunk])
    assert (runner.storage == 0xFF).all()
    with pytest.raises(InvalidArgumentError, match="at least one"):
        runner.forward([])


@pytest.mark.parametrize(
    "storage",
    [
        torch.zeros(4, 100, dtype=torch.uint8),
        torch.zeros(4, 8192),
        torch.zeros(8192, 4, dtype=torch.uint8).t(),
    ],
)
def test_storage_of_another_shape_is_refused(tiny_model: LoadedModel, storage: torch.Tensor) -> None:
    assert tiny_model.block_bytes(BLOCK) == 8192
    with pytest.raises(InvalidArgumentError, match="storage must be contiguous"):
        Runner(tiny_model, storage, block_count=4, block_tokens=BLOCK)


def test_bfloat16_stays_close_to_transformers(tiny_path: Path) -> None:
    model = LoadedModel.load(tiny_path, dtype="bfloat16")
    runner, prompt = poisoned(model), prompt_of(model, 50)
    got = runner.forward([Chunk(prompt, 0, table_of(runner, 50), True)])[0]
    with torch.inference_mode():
        expected = model.module(torch.tensor([prompt])).logits[0, -1].float()
    assert (got - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.nightly
@pytest.mark.timeout(900)  # its threads share the processors with whatever else runs
def test_the_real_model_equals_transformers() -> None:
    if not (USER_CACHE / "models" / DEFAULT_MODEL).is_dir():
        pytest.skip(f"{DEFAULT_MODEL} is not in the cache; `make demo` puts it there")
    model = LoadedModel.load(resolve(DEFAULT_MODEL, cache_dir=USER_CACHE))
    question = model.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    text = model.detokenizer(question)
    runner = poisoned(model, 80)
    assert "Paris" in "".join(text.push(token) for token in generate(runner, question, 8))
    for length in (1, 16, 17, 250, 1000):
        prompt = (question * 40)[:length]
        wanted = reference(model, prompt, 12)
        for size in (None, 128):
            check_same(prompt, generate(runner, prompt, 12, size=size), *wanted)
