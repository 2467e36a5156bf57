"""Other lengths for the requests of a trace: longer or shorter by a factor, and cut.

Decides that sharing stays: where a prompt has hash ids, each then stands for so many more or fewer tokens, so what two
prompts share grows with them, and the share of tokens that a prefix cache can know is what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.request import TOKENS_MAX, WorkloadRequest


@dataclasses.dataclass(frozen=True)
class ScaledLengths:
    """``prompt`` and ``output`` are factors; the bounds are in tokens after scaling, 0: none."""

    prompt: float = 1.0
    output: float = 1.0
    prompt_max: int = 0
    output_max: int = 0
    hash_tokens: int = 512
    """Of the trace."""

    @property
    def hash_tokens_scaled(self) -> int:
        """What a hash id stands for afterwards, a whole number: prompts with hash ids are scaled by it, which is nearly
        ``prompt``."""
        return max(1, round(self.hash_tokens * self.prompt))

    def of_all(self, requests: Iterable[WorkloadRequest]) -> list[WorkloadRequest]:
        """The same requests with these lengths, at least one token each. Text stays as it is. Raises
        InvalidArgumentError for one that would be longer than TOKENS_MAX."""
        return [self.of(request) for request in requests]

    def of(self, request: WorkloadRequest) -> WorkloadRequest:
        if request.text is not None:
            prompt, ids = request.prompt_tokens, request.hash_ids
        else:
            prompt, ids = self._prompt(request)
        output = max(1, round(request.output_tokens * self.output))
        if self.output_max:
            output = min(output, self.output_max)
        if max(prompt, output) > TOKENS_MAX:
            raise InvalidArgumentError(f"a scaled length would be {max(prompt, output)}, more than {TOKENS_MAX} tokens")
        if (prompt, output, ids) == (request.prompt_tokens, request.output_tokens, request.hash_ids):
            return request
        return dataclasses.replace(request, prompt_tokens=prompt, output_tokens=output, hash_ids=ids)

    def _prompt(self, request: WorkloadRequest) -> tuple[int, tuple[int, ...]]:
        ids = request.hash_ids
        if not ids:
            prompt = max(1, round(request.prompt_tokens * self.prompt))
        else:
            size = self.hash_tokens_scaled
            full, rest = divmod(request.prompt_tokens, self.hash_tokens)
            prompt = full * size + -(-rest * size // self.hash_tokens)
        if self.prompt_max:
            prompt = min(prompt, self.prompt_max)
        if ids:
            ids = ids[: -(-prompt // self.hash_tokens_scaled)]
        return prompt, ids
