"""How many prompt tokens of a workload a prefix cache can have from the workload itself, where it was empty before.

Decides that by what the requests say of themselves: hash ids, or their text. Knows nothing of caches and their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.workload.request import Workload, WorkloadRequest


def shared_tokens(workload: Workload) -> int:
    """Prompt tokens of all requests together that stand in another one's prompt before: all, less those that are there
    for the first time. The order in which the requests are sent makes no difference to their sum, and a cache finds no
    more than them. Of texts it is an estimate, by the share of their characters."""
    total = sum(request.prompt_tokens for request in workload.requests)
    return total - _first_of_blocks(workload) - _first_of_texts(workload.requests)


def _first_of_blocks(workload: Workload) -> int:
    """A block that is cut, as the last of a prompt, may be longer in another prompt: the longest counts."""
    longest: dict[int, int] = {}
    alone = 0
    for request in workload.requests:
        if request.text is not None:
            continue
        if not request.hash_ids:
            alone += request.prompt_tokens
            continue
        left = request.prompt_tokens
        for block in request.hash_ids:
            longest[block] = max(longest.get(block, 0), min(left, workload.hash_tokens))
            left -= workload.hash_tokens
    return alone + sum(longest.values())


def _first_of_texts(requests: Sequence[WorkloadRequest]) -> int:
    """Sorted, each text shares with the one before as much as it shares with any before it."""
    texts = sorted((request.text, request.prompt_tokens) for request in requests if request.text is not None)
    before, new = "", 0
    for text, tokens in texts:
        new += tokens - tokens * _alike(before, text) // max(1, len(text))
        before = text
    return new


def _alike(one: str, other: str) -> int:
    """How many characters both begin with: found by halves, as they may be millions."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
