"""A prefill, a decode and a monolithic engine of one kind of model, and what must hold of a prompt that went through
them: the same tokens, and the source's bytes in every group. Knows vLLM's block tables, and no connector's code."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from tests.support.vllm.checks import prompt
from tests.support.vllm.engines import Answer, Cluster, Engine, both_legs, hand_over
from tests.support.vllm.hybrid_models import WINDOW, HybridKind, make_hybrid_model
from tests.support.vllm.stock import WHEELS

ANSWER = 12
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1, 5 * WINDOW - 1)
"""Around the edges of a window, and of blocks of 32: those of a kind with other blocks are added."""


def token_ids(length: int, seed: object) -> list[int]:
    """A prompt of these models' vocabulary."""
    return [3 + token % 500 for token in prompt(length, seed)]


def lengths_of(kind: HybridKind) -> list[int]:
    """Lengths of prompts at the edges of windows and blocks."""
    block = kind.full_block_tokens
    return sorted({*LENGTHS, block - 1, block, block + 1, 2 * block + 1})


@contextlib.asynccontextmanager
async def trio(
    directory: pathlib.Path,
    kind: HybridKind,
    *,
    connector: str = "KvxferConnector",
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    has_mono: bool = True,
    **shared: Any,
) -> AsyncIterator[Cluster]:
    """Engines ``p``, ``d`` and ``mono``. ``prefill`` and ``decode``: options of vLLM for one of them; ``shared``: for
    both and for ``mono``. Without other words they keep no prefixes."""
    model = make_hybrid_model(kind, directory / f"model-{kind.name}")
    llm = {**kind.engine, "enable_prefix_caching": False, **shared}
    async with Cluster(directory, model) as cluster:
        for name, role, own in (("p", "kv_producer", prefill), ("d", "kv_consumer", decode)):
            options = {**llm, **(own or {})}
            if connector == "KvxferConnector":
                await cluster.start(name, role, extra={"record_digests": False, **(extra or {})}, **options)
            else:
                transfer, environment = stock_settings(connector, role)
                await cluster.start(name, None, transfer=transfer, environment=environment, **options)
        if has_mono:
            own = {} if kind.dtype == "float32" else (prefill or {})  # in bfloat16 it matters where a prompt is cut
            cut = {name: value for name, value in own.items() if name == "max_num_batched_tokens"}
            await cluster.start("mono", None, **{**llm, "enable_prefix_caching": bool(cut), **cut})
        for engine in cluster.engines.values():
            await engine.wait_ready()
            await assert_is_hybrid(engine, kind)
        yield cluster


def stock_settings(connector: str, role: str) -> tuple[dict[str, Any], dict[str, str]]:
    """vLLM's settings, and the environment, of its own connector on NVIDIA's wheels, which `make test-vllm` fetches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    transfer = {"kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu"}
    return transfer, {
        "PYTHONPATH": ":".join(map(str, WHEELS)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": port,
    }


async def assert_is_hybrid(engine: Engine, kind: HybridKind) -> None:
    """vLLM keeps each kind of layer in groups of its own: neither it nor a connector switched that off."""
    found = await engine.ask("groups")
    assert found["hybrid"], f"{engine.name}: vLLM's hybrid manager is off"
    assert sorted((name, layers) for name, layers, *_ in found["groups"]) == sorted(kind.groups), engine.name


async def through(
    cluster: Cluster, ids: list[int], *, is_concurrent: bool = False, n: int = ANSWER
) -> tuple[Answer, Answer, str, str]:
    """One prompt through both engines: both answers, and the requests' ids."""
    prefill, decode = cluster["p"], cluster["d"]
    if not is_concurrent:
        first, answer = await hand_over(prefill, decode, ids, n)
        return first, answer, first["id"], answer["id"]
    legs = both_legs(prefill, decode)
    waiting, computing = decode.add(ids, n, legs[1]), prefill.add(ids, 1, legs[0])
    first, answer = await asyncio.gather(prefill.wait(computing), decode.wait(waiting))
    return first, answer, computing, waiting


async def assert_same_group_bytes(cluster: Cluster, sent_id: str, arrived_id: str) -> int:
    """Every part of a block that was moved is the source's: of each group, at each position that vLLM gave a block
    beyond what it had, of each layer. How many there are."""
    sent = _of(await cluster["p"].ask("sent"), sent_id)
    arrived = _of(await cluster["d"].ask("arrived"), arrived_id)
    groups = (await cluster["d"].ask("groups"))["groups"]
    assert sent is not None, "nothing was sent"
    assert arrived is not None, "nothing arrived"
    assert len(sent) == len(arrived["groups"]) == len(groups)
    count = 0
    for number, (kind, _, block_tokens, window) in enumerate(groups):
        here = {int(position): rows for position, rows in arrived["groups"][number].items()}
        there = {int(position): rows for position, rows in sent[number].items()}
        wanted = needed(kind, arrived["tokens"], arrived["local"], block_tokens, window)
        if kind == "MambaSpec":
            wanted = {max(here)}
            there = {max(here): there[max(there)]}
        for position in sorted(wanted):
            assert position in here, f"group {number} ({kind}) has no block at {position}: {sorted(here)}"
            assert position in there, f"group {number} ({kind}) sent no block at {position}: {sorted(there)}"
            for layer, (mine, theirs) in enumerate(zip(here[position], there[position], strict=True)):
                assert mine == theirs, f"group {number} ({kind}), position {position}, layer {layer} differs"
                count += 1
    return count


async def alone(mono: Engine, kind: HybridKind, ids: list[int], n: int = ANSWER) -> Answer:
    """The single engine's answer. In bfloat16 it decodes the prompt's last token, as the decode engine does: vLLM's
    kernels for prefill and for decode round otherwise there."""
    return await mono.wait(mono.add(ids, n, apart=kind.dtype != "float32"))


def assert_same_tokens(kind: HybridKind, answer: Answer, whole: Answer, told: object) -> None:
    """The answers are the same, where vLLM's own answer to a prompt is the same however it is computed."""
    assert len(answer.tokens) == len(whole.tokens), told
    if kind.is_repeatable:
        assert answer.tokens == whole.tokens, told


def needed(kind: str, tokens: int, local: int, block_tokens: int, window: int | None) -> set[int]:
    """Positions of a group's block table that hold what a reader needs which has ``local`` of ``tokens`` tokens and
    goes on after them: all, those of the last window - 1 tokens, or those of the chunk that the next token is in."""
    begin = local
    if kind == "SlidingWindowSpec" and window is not None:
        begin = max(begin, tokens - window + 1)
    if kind == "ChunkedLocalAttentionSpec" and window is not None:
        begin = max(begin, tokens // window * window)
    return set(range(begin // block_tokens, -(-tokens // block_tokens)))


def _of(found: dict[str, Any], request_id: str) -> Any:
    """vLLM adds something of its own to a request's id."""
    return next((value for key, value in found.items() if key.startswith(request_id)), None)


async def assert_right(
    cluster: Cluster, kind: HybridKind, lengths: list[int], seed: object, *, is_concurrent: bool = False
) -> None:
    """These prompts, all at once: the tokens of the single engine, no error, and the source's bytes. In bfloat16 the
    tokens of several prompts prove nothing: one engine without any connector gave 1 of 48 prompts another answer when
    it computed eight at once."""
    prompts = [token_ids(length, seed) for length in lengths]
    wanted = [await alone(cluster["mono"], kind, ids) for ids in prompts]
    got = await asyncio.gather(*(through(cluster, ids, is_concurrent=is_concurrent) for ids in prompts))
    for ids, whole, (_, answer, sent_id, arrived_id) in zip(prompts, wanted, got, strict=True):
        told = f"a prompt of {len(ids)} tokens: {answer.report}"
        assert answer.report.get("code", "") == "", told
        if len(ids) > 1:
            assert answer["loaded_ms"] is not None, f"{told}: it was computed and not moved"
            await assert_same_group_bytes(cluster, sent_id, arrived_id)
        if kind.dtype == "float32" or len(prompts) == 1:
            assert_same_tokens(kind, answer, whole, told)
