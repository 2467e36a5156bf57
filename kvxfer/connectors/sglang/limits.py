"""What this backend does not support, refused by name before a byte moves. Decides which of SGLang's settings and
layouts are refused; must never know how a transfer works. SGLang's objects are read by attribute.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.errors import ConfigError, IncompatibleError, WeightsUnknownError
from kvxfer.protocol.handshake import Mismatch, compare_records, sentence
from kvxfer.types import CompatibilityRecord

WHOLE_ROWS = ("mamba", "swa")
"""Components of hybrid models whose rows are moved as bytes: they mean the same at every row."""
ONLY = (
    ("tokenizer_worker_num", 1, "--tokenizer-worker-num: SGLang loads no plugins in further tokenizer workers"),
    ("attn_cp_size", 1, "--attn-cp-size: pages are not shared out between context-parallel ranks yet"),
    ("dcp_size", 1, "--dcp-size: pages are not laid out anew for decode context parallelism yet"),
    ("enable_kv_cache_sharding", False, "--enable-kv-cache-sharding: each rank holds every page here"),
    ("enable_dsa_cache_layer_split", False, "--enable-dsa-cache-layer-split: each rank holds every layer here"),
    ("enable_hisparse", False, "--enable-hisparse: pages are not received into the host's pool yet"),
    ("enable_lora", False, "--enable-lora: SGLang does not tell a transfer which adapter its prompt was computed with"),
    ("lora_paths", None, "--lora-paths: SGLang does not tell a transfer which adapter its prompt was computed with"),
    ("enable_memory_saver", False, "--enable-memory-saver: the agent reads memory that would be unmapped under it"),
    ("enable_pd_role_switch", False, "--enable-pd-role-switch: an engine keeps its role; start another one instead"),
    (
        *("disaggregation_decode_allocation_policy", "early"),
        "--disaggregation-decode-allocation-policy: decode's pages are asked for before the prompt is computed",
    ),
    (
        *("disaggregation_decode_host_receive_threshold", 1),
        "--disaggregation-decode-host-receive-threshold: pages are not received into the host's pool yet",
    ),
)
"""(setting, the one value that works, why)."""
LOCAL_FORMATS = frozenset(
    ("auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "mistral", "fastsafetensors", "sharded_state")
)
"""SGLang's load formats that read the files of a directory, and nothing else."""


def check_arguments(arguments: Any) -> None:
    """Raise ConfigError, naming it, for the first of SGLang's settings that this backend does not work with. A setting
    that a version does not have is as it was before there was one."""
    for name, wanted, why in ONLY:
        found = getattr(arguments, name, wanted)
        if found != wanted and (found or wanted) and not (found is None or (name.endswith("_size") and found == 0)):
            flag, _, reason = why.partition(": ")
            raise ConfigError(f"the transfer backend kvxfer works with {flag} {wanted} only, not {found}: {reason}")
    for flag, found in load_formats(arguments).items():
        if found not in LOCAL_FORMATS:
            raise ConfigError(
                f"the transfer backend kvxfer does not work with {flag} {found}, which reads no files that could be "
                f"compared: all that it serves comes from, or goes to, an engine with the same weights. It works with "
                f"{', '.join(sorted(LOCAL_FORMATS))}"
            )


def load_formats(arguments: Any) -> dict[str, str]:
    """What an engine's weights are read as, by the setting that says so; those of a draft model too."""
    found = {"--load-format": getattr(arguments, "load_format", None) or "auto"}
    if getattr(arguments, "speculative_draft_model_path", None):
        draft = getattr(arguments, "speculative_draft_load_format", None)
        found["--speculative-draft-load-format"] = draft or found["--load-format"]
    return {flag: str(getattr(value, "value", value)) for flag, value in found.items()}


def check_components(names: Sequence[str], addresses: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError for a component of a hybrid model that is not moved yet."""
    for name, found in zip(names, addresses, strict=True):
        if name not in WHOLE_ROWS:
            raise ConfigError(
                f"the transfer backend kvxfer does not move the state component {name!r} yet; it moves "
                f"{', '.join(WHOLE_ROWS)}"
            )
        if not all(found):
            raise ConfigError(f"buffers of the state component {name!r} lie nowhere: other ranks have its layers")


def check_sizes(*, is_cut: bool, has_all_heads: bool, prefill: Any, decode_tp_size: int, decode_pp_size: int) -> None:
    """``prefill``: SGLang's PrefillServerInfo; ``is_cut``: it is known what our pages hold of the model;
    ``has_all_heads``: each rank holds what every head needs. Raise IncompatibleError where its ranks cannot be paired
    with ours."""
    sizes = sorted((prefill.attn_tp_size, decode_tp_size))
    if not (is_cut or has_all_heads) and sizes[0] != sizes[1]:
        why = "it must be the same where it is not known how pages hold heads"
        raise _unequal("attn_tp_size", decode_tp_size, prefill.attn_tp_size, why)
    if sizes[0] < 1 or sizes[1] % sizes[0]:
        raise _unequal("attn_tp_size", decode_tp_size, prefill.attn_tp_size, "one must divide the other")
    if prefill.pp_size != decode_pp_size:
        if decode_pp_size != 1:
            raise _unequal("pp_size", decode_pp_size, prefill.pp_size, "it must be the same, or 1 here")
        if not is_cut:
            why = "it must be the same where it is not known how pages hold layers"
            raise _unequal("pp_size", decode_pp_size, prefill.pp_size, why)
    if prefill.attn_cp_size != 1:
        raise _unequal("attn_cp_size", 1, prefill.attn_cp_size, "it must be 1")
    for name in ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split"):
        if getattr(prefill, name, False):
            raise _unequal(name, False, True, "each prefill rank must hold every page")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a rank's memory is cut, as both sides must have it."""

    kv_item_lens: tuple[int, ...]
    aux_item_lens: tuple[int, ...]
    state_types: tuple[str, ...] = ()
    state_item_lens: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Lists and texts only."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a rank's pages are: as both sides must have them, and, where that is known, what they hold of the model,
    which may differ."""

    record: CompatibilityRecord
    layout: Layout
    shape: KvShape | None = None


def check_peer(ours: Identity, theirs: Identity) -> None:
    """Raise IncompatibleError, naming each field that differs with both values, unless pages may move, as far as their
    shapes allow (:func:`~.shape.common`); WeightsUnknownError where only that is not known."""
    wrong = list(compare_records(ours.record, theirs.record))
    is_cut = [identity.shape is not None for identity in (ours, theirs)]
    if is_cut[0] != is_cut[1]:
        wrong.append(Mismatch("shape", *("known" if is_known else "not known" for is_known in is_cut)))
    for field in dataclasses.fields(Layout):
        here, there = getattr(ours.layout, field.name), getattr(theirs.layout, field.name)
        if here != there and not (field.name == "kv_item_lens" and all(is_cut)):
            wrong.append(Mismatch(field.name, shortened(here), shortened(there)))
    if wrong:
        kind = WeightsUnknownError if all(mismatch.is_unknown for mismatch in wrong) else IncompatibleError
        raise kind(f"the engines do not match: {sentence(wrong)}", field=wrong[0].field)


def shortened(values: Sequence[Any]) -> str:
    """A list as a sentence can carry it: equal neighbours are counted."""
    runs: list[tuple[int, str]] = []
    for text in (json.dumps(value) for value in values):
        if runs and runs[-1][1] == text:
            runs[-1] = (runs[-1][0] + 1, text)
        else:
            runs.append((1, text))
    return ", ".join(text if count == 1 else f"{count} x {text}" for count, text in runs)[:300]


def _unequal(field: str, ours: object, theirs: object, why: str) -> IncompatibleError:
    return IncompatibleError(f"the engines do not match: {field} is {ours} here and {theirs} there: {why}", field=field)
