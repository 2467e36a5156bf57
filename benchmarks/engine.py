"""Time the built-in engine's forward pass beside transformers' own, in pairs, in one process.

    python benchmarks/engine.py [--model smollm2-135m-instruct] [--threads 2] [--pairs 9]

Prints medians: a prefill of 1,000 tokens, whole and in chunks of 128; a decode step at 100 and 2,000 tokens; a decode
step of 8 sequences. transformers runs with a DynamicCache and the same attention kernel.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from kvxfer.engine import Chunk, LoadedModel, Runner, resolve

TABLE_BLOCKS = 160


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Bench:
    def __init__(self, model: LoadedModel, pairs: int) -> None:
        self.model = model
        self.pairs = pairs
        self.runner = Runner(model, block_count=8 * TABLE_BLOCKS)
        draw = random.Random(0)
        blocks = draw.sample(range(8 * TABLE_BLOCKS), 8 * TABLE_BLOCKS)
        self.tables = [blocks[i * TABLE_BLOCKS : (i + 1) * TABLE_BLOCKS] for i in range(8)]
        self.tokens = draw.choices(range(3, model.vocab_size), k=2048)

    def prefill(self, count: int, size: int, table: list[int]) -> None:
        for start in range(0, count, size):
            end = min(start + size, count)
            self.runner.forward([Chunk(self.tokens[start:end], start, table, end == count)])

    @torch.inference_mode()
    def plain_prefill(self, count: int) -> transformers.DynamicCache:
        cache = transformers.DynamicCache(config=self.model.config)
        self.model.module(torch.tensor([self.tokens[:count]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def plain_step(self, cache: transformers.DynamicCache) -> None:
        self.model.module(torch.tensor([[5]]), past_key_values=cache, use_cache=True)

    def compare(self, what: str, ours: Callable[[int], object], theirs: Callable[[int], object]) -> None:
        ours(0)
        theirs(0)
        runs = [(seconds(lambda i=i: ours(i)), seconds(lambda i=i: theirs(i))) for i in range(1, self.pairs + 1)]
        one, other = (statistics.median(column) for column in zip(*runs, strict=True))
        ratio = statistics.median(a / b for a, b in runs)
        print(f"{what:42} {one * 1e3:8.1f} ms   transformers {other * 1e3:8.1f} ms   ratio {ratio:.2f}")

    def run(self) -> None:
        first = self.tables[0]
        for size in (1000, 128):
            self.compare(
                f"prefill of 1,000 tokens in chunks of {size}",
                lambda _, size=size: self.prefill(1000, size, first),
                lambda _: self.plain_prefill(1000),
            )
        for context in (100, 2000):
            self.prefill(context, 512, first)
            cache = self.plain_prefill(context)
            self.compare(
                f"decode step at {context} tokens",
                lambda i, context=context: self.runner.forward([Chunk([5], context + i, first, True)]),
                lambda _, cache=cache: self.plain_step(cache),
            )
        for context in (100, 1000):
            for table in self.tables:
                self.prefill(context, 512, table)
            taken = [
                seconds(
                    lambda i=i, context=context: self.runner.forward(
                        [Chunk([5], context + i, table, True) for table in self.tables]
                    )
                )
                for i in range(self.pairs)
            ]
            print(f"{f'decode step of 8 sequences at {context} tokens':42} {statistics.median(taken) * 1e3:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = LoadedModel.load(resolve(options.model))
    print(
        f"{model.name} {model.dtype}, {options.threads} threads, torch {torch.__version__}, "
        f"medians of {options.pairs} pairs"
    )
    Bench(model, options.pairs).run()


if __name__ == "__main__":
    main()
