"""Traces that others published: where each is, how it is recognised, and under which licence. Values only.

Each digest was computed from the file of the commit that its address names, or, where ``bytes`` is None, taken from
what several users of the trace published. A trace of which neither is known is not here.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PublishedTrace:
    """One file."""

    name: str
    """Of the file, as it is stored."""
    url: str
    sha256: str
    bytes: int | None
    """None: the digest is the one that others published, without a size."""
    source: str
    """In words, with its licence."""


_MOONCAKE = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release"
)
_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"

PUBLISHED = (
    PublishedTrace(
        "mooncake_conversation.jsonl",
        f"{_MOONCAKE}/traces/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        3029533,
        "Mooncake, conversation (FAST'25, kvcache-ai/Mooncake), Apache-2.0",
    ),
    PublishedTrace(
        "mooncake_synthetic.jsonl",
        f"{_MOONCAKE}/traces/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        1136313,
        "Mooncake, synthetic (FAST'25, kvcache-ai/Mooncake), Apache-2.0",
    ),
    PublishedTrace(
        "mooncake_toolagent.jsonl",
        f"{_MOONCAKE}/traces/toolagent_trace.jsonl",
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
        None,
        "Mooncake, tool and agent (FAST'25, kvcache-ai/Mooncake), Apache-2.0",
    ),
    PublishedTrace(
        "azure_2023_code.csv",
        f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        320117,
        "Azure LLM inference trace 2023, code (Azure/AzurePublicDataset), CC-BY-4.0",
    ),
    PublishedTrace(
        "azure_2023_conversation.csv",
        f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        719188,
        "Azure LLM inference trace 2023, conversation (Azure/AzurePublicDataset), CC-BY-4.0",
    ),
)


def source_of(sha256: str) -> str:
    """The words for a file of that digest; empty where it is none of these."""
    return next((trace.source for trace in PUBLISHED if trace.sha256 == sha256), "")
