"""The weight files of a checkpoint, their common digest, and that of its config. Decides which of them count, and
what a model's name means on this host; must never know an engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.common.file_digests import XXH3, digests_of
from kvxfer.connectors.common.stamps import Stamp
from kvxfer.types import UNKNOWN_NONCE_BYTES, unknown_fingerprint

WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".npy", ".tensors", ".h5", ".msgpack", ".onnx")
)
"""Suffixes of files that loaders of vLLM, SGLang and known plugins read weights from."""
NOT_FOR_INFERENCE = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")
)
"""Files that trainers leave beside them and that engines do not load."""
BOOKKEEPING = frozenset(
    {"_attn_implementation", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of a model's config that say nothing about the KV of a token; the dtype is a field of its own."""
WHY_MAX = 300


class NotKnown(Exception):
    """The weights of an engine are unknown; the text says why."""


@dataclasses.dataclass(frozen=True)
class ModelName:
    """The name of a model that an engine loads: a path, or a name of the hub."""

    model: str
    revision: str = ""
    download_dir: str | None = None


def config_fingerprint(config: dict[str, Any], facts: dict[str, Any] | None = None) -> str:
    """SHA-256 over the canonical JSON of a model's config, as an engine has it, without paths and versions, and of
    ``facts`` beside it: 64 hex digits."""
    kept = {key: value for key, value in config.items() if key not in BOOKKEEPING}
    text = json.dumps([kept, facts or {}], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def unknown(why: str) -> str:
    """A fingerprint of unknown weights. It is unique, so it equals no other fingerprint."""
    return unknown_fingerprint(printable(why), secrets.token_bytes(UNKNOWN_NONCE_BYTES))


def printable(why: str) -> str:
    """A reason as records and messages carry it: printable ASCII, on one line, of at most WHY_MAX characters. It may
    quote a path, or what a client of the hub says."""
    text = " ".join(why.split()).encode("ascii", "backslashreplace").decode()
    return "".join(character for character in text if character.isprintable())[:WHY_MAX]


def weight_files(name: ModelName) -> list[str]:
    """The weight files of the model, sorted. They are those of a directory or, if the name is one of the hub's, of the
    snapshot that this host's cache has; nothing is fetched. Raises NotKnown, OSError."""
    place = pathlib.Path(name.model).expanduser()
    if place.is_file():
        return [os.path.abspath(place)]
    place = directory_of(name)
    found = [str(path) for path in place.iterdir() if is_weight_file(path) and path.is_file()]
    if not found:
        raise NotKnown(f"{place} has no weight files")
    return sorted(os.path.abspath(path) for path in found)


def directory_of(name: ModelName) -> pathlib.Path:
    """The directory of the model's files on this host. Raises NotKnown."""
    place = pathlib.Path(name.model).expanduser()
    if place.is_file():
        return place.parent
    return place if place.is_dir() else _snapshot(name)


def is_weight_file(path: pathlib.Path) -> bool:
    """Whether its name is that of a weight file."""
    return path.suffix.lower() in WEIGHT_SUFFIXES and path.name not in NOT_FOR_INFERENCE


def fingerprint_of(
    files: Mapping[str, Stamp], cache: DigestCache, should_stop: Callable[[], bool] = lambda: False
) -> str:
    """XXH3-128 over names, sizes and whole contents of weight files that have those stamps: 32 hex digits. Their
    directory does not count. Raises as :func:`~kvxfer.connectors.common.file_digests.digests_of`."""
    digests = digests_of(files, XXH3, cache, should_stop)
    return _digest_of((os.path.basename(path), stamp.size, digests[path]) for path, stamp in sorted(files.items()))


def _digest_of(rows: Iterable[tuple[str, int, str]]) -> str:
    whole = xxhash.xxh3_128()
    for name, size, digest in rows:
        whole.update(f"{len(name.encode())} {name} {size} {digest}\n".encode())
    return whole.hexdigest()


def _snapshot(name: ModelName) -> pathlib.Path:
    """The snapshot in the hub's cache of this host."""
    flags = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
    if any(os.environ.get(flag, "").lower() in ("1", "true") for flag in flags):
        raise NotKnown(f"{name.model} is a name of ModelScope's")
    repository = name.model.partition(":")[0]  # what follows names one of a repository's GGUF files
    try:
        import huggingface_hub

        found = huggingface_hub.snapshot_download(
            repository, revision=name.revision or None, cache_dir=name.download_dir, local_files_only=True
        )
    except Exception as error:  # whatever the hub's client raises over a name or a cache
        raise NotKnown(f"{name.model} is no directory, and no snapshot of it is on this host: {error}") from None
    return pathlib.Path(found)
