"""Prompts of one hybrid kind with the single engine's answers, and what may come of a request whose handle is not as it
should be: the right tokens. Counts the errors' names. Knows no fault and no connector's code."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from tests.support.vllm.engines import Answer, Engine
from tests.support.vllm.hybrid import alone, token_ids
from tests.support.vllm.hybrid_models import HybridKind

TOKENS = 8
DRAWS_MAX = 20


@dataclasses.dataclass(frozen=True)
class Case:
    """``loaded``: the right tokens where the prompt but its last token came from another engine; ``computed``: where
    this engine computed all of it. In bfloat16 they may differ: vLLM's kernels round otherwise."""

    ids: list[int]
    loaded: list[int]
    computed: list[int]


class Judge:
    """Of the answers to these prompts."""

    def __init__(self, kind: HybridKind, cases: list[Case]) -> None:
        self.kind = kind
        self.cases = cases
        self.codes: collections.Counter[str] = collections.Counter()

    @classmethod
    async def ask(cls, kind: HybridKind, mono: Engine, lengths: list[int], seed: object) -> Judge:
        """Have the single engine answer two prompts of each length. No two answers are the same, so that another
        prompt's would be seen."""
        cases: list[Case] = []
        for number, length in enumerate(lengths + lengths):
            for draw in range(DRAWS_MAX):
                ids = token_ids(length, f"{seed} {number} {draw}")
                whole = await alone(mono, kind, ids, TOKENS)
                if all(whole.tokens != case.loaded for case in cases) and len(set(whole.tokens)) > 2:
                    break
            cases.append(Case(ids, whole.tokens, (await mono.generate(ids, TOKENS)).tokens))
        assert len({tuple(case.loaded) for case in cases}) == len(cases), "two prompts have the same answer"
        return cls(kind, cases)

    def __getitem__(self, number: int) -> Case:
        return self.cases[number % len(self.cases)]

    def other(self, number: int, *, is_alike: bool) -> Case:
        """Another prompt than that one: of the same length, or not."""
        half = len(self.cases) // 2
        return self[number + half] if is_alike else self[number + 1]

    def judge(self, case: Case, answer: Answer, told: object) -> str:
        """The answer is right, whatever became of its load. Returns the error's name: empty where it was loaded,
        "computed" where no load was tried and nothing is said of that."""
        code = str(answer.report.get("code", "computed" if len(case.ids) > 1 else ""))
        self.codes[code or "loaded"] += 1
        assert answer["reason"] == "length", (told, answer)
        right = case.loaded if code == "" else case.computed
        if self.kind.is_repeatable:
            assert answer.tokens == right, (told, len(case.ids), answer.report)
        assert answer["loaded_ms"] is not None or code, (told, answer)
        return code


def without_answer(kv: dict[str, Any], prefill: Engine) -> dict[str, Any]:
    """The same prompt as a router names it that sends both legs at once: by its id and its engine."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": kv["transfer_id"],
        "source": {"agent_id": prefill.name, "ranks": 1},
    }
