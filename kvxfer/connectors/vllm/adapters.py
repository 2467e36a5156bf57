"""Which LoRA adapter a request is computed with: what vLLM's workers loaded under its number, as long as its files are
as they were then. Decides what an adapter's files are; content is read in the background only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from kvxfer.connectors.common.checkpoint import unknown
from kvxfer.connectors.common.digest_cache import DigestCache
from kvxfer.connectors.common.file_digests import SHA256, FileChanged, digests_of, shared_cache
from kvxfer.connectors.common.stamps import Stamp, stamp_of
from kvxfer.connectors.vllm.loaded import LOADED, AdapterLoad, Loaded

log = logging.getLogger("kvxfer.vllm")

PREFIXES = ("adapter_", "new_embeddings")
"""How the files are called that vLLM, and PEFT, read an adapter from."""
FILES_MAX = 256
READERS_MAX = 2
"""Adapters that are read at once."""
KNOWN_MAX = 4096

Files = tuple[tuple[str, Stamp], ...]
NOTHING: Files = ()


def adapter_files(directory: str) -> Files:
    """The files of the adapter in ``directory`` as they are now, sorted. Raises OSError, also where there are none, or
    more than FILES_MAX."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if entry.name.startswith(PREFIXES))
    if not 0 < len(names) <= FILES_MAX:
        raise OSError(f"{directory} has {len(names)} files of an adapter")
    paths = (os.path.join(directory, name) for name in names)
    return tuple((path, stamp_of(path)) for path in paths)


def adapter_digest(files: Mapping[str, Stamp], cache: DigestCache) -> str:
    """SHA-256 over names, sizes and whole contents of an adapter's files: 64 hex digits. Where they lie does not count.
    Raises FileChanged, OSError."""
    digests = digests_of(files, SHA256, cache)
    whole = hashlib.sha256()
    for path, stamp in sorted(files.items()):
        name = os.path.basename(path)
        whole.update(f"{len(name.encode())} {name} {stamp.size} {digests[path]}\n".encode())
    return whole.hexdigest()


class Adapters:
    """Of one engine's scheduler, whose workers are ``ranks``, and compute with adapters in ``dtype``. Its methods are
    called on the scheduler's thread."""

    def __init__(
        self, ranks: int, dtype: str = "", *, loaded: Loaded = LOADED, cache: DigestCache | None = None
    ) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._loaded = loaded
        self._cache = cache
        self._lock = threading.Lock()
        self._found: dict[Files, tuple[str, str]] = {}
        """By the files that were loaded: their digest, or why there is none. Of those that are being read: two empty
        texts."""
        self._changed: set[tuple[str, int]] = set()
        """Loads whose files were changed since."""
        self._named: dict[str, Files | None] = {}
        """What was loaded under each name; ``None``: more than one thing."""
        self._has_forgotten = False
        self._turns = threading.BoundedSemaphore(READERS_MAX)
        self._unlisten = loaded.listen_adapters(self._on_load)

    def fingerprint(self, request: Any) -> str:
        """Of vLLM's LoRARequest: what was loaded for it, or a text that equals nothing and says why."""
        name = f"LoRA adapter {str(getattr(request, 'lora_name', ''))[:100]!r}"
        loads = self._loaded.loads_of(int(request.lora_int_id))
        if len(loads) < self._ranks:
            is_watching = self._loaded.is_watching
            seen = "has not been loaded by all workers yet" if is_watching else "was not seen loaded by any worker"
            return unknown(f"{name} {seen}")
        first = loads[0]
        for load in loads:
            if load.why:
                return unknown(f"{name}: {load.why}")
            if load.files != first.files:
                return unknown(f"{name}: not all workers have loaded the same files")
        if self._has_changed(loads):
            return unknown(f"{name}: its files were changed after they were loaded")
        digest, why = self._known(first)
        if digest:
            return f"{digest} {self._dtype}"
        return unknown(f"{name}: {why or 'its files are still being read'}")

    def was_another(self, request: Any) -> bool:
        """Whether something else was loaded under that name before. vLLM's prefix cache goes by names, and may have
        blocks that were computed with that."""
        found = self._named.get(str(request.lora_name), NOTHING)
        return found is None or (found is NOTHING and self._has_forgotten)

    def stop(self) -> None:
        """Callable twice."""
        self._unlisten()

    def _has_changed(self, loads: tuple[AdapterLoad, ...]) -> bool:
        keys = {(load.source, load.number) for load in loads}
        if keys & self._changed:
            return True
        try:
            is_same = adapter_files(loads[0].path) == loads[0].files
        except OSError:
            is_same = False
        if not is_same:
            self._changed |= keys
            while len(self._changed) > KNOWN_MAX:
                self._changed.pop()
        return not is_same

    def _on_load(self, load: AdapterLoad) -> None:
        with self._lock:
            if self._named.setdefault(load.name, load.files) != load.files or load.why:
                self._named[load.name] = None
            while len(self._named) > KNOWN_MAX:
                self._named.pop(next(iter(self._named)))
                self._has_forgotten = True
        if not load.why:
            self._known(load)

    def _known(self, load: AdapterLoad) -> tuple[str, str]:
        with self._lock:
            found = self._found.get(load.files)
            if found is not None:
                return found
            while len(self._found) >= KNOWN_MAX:
                self._found.pop(next(iter(self._found)))
            self._found[load.files] = ("", "")
        threading.Thread(target=self._read, args=(load.files,), name="kvxfer adapter", daemon=True).start()
        return "", ""

    def _read(self, files: Files) -> None:
        with self._turns:
            try:
                found = (adapter_digest(dict(files), self._cache or shared_cache()), "")
            except (OSError, FileChanged) as error:
                found = ("", f"its files cannot be read as they were loaded: {error}")
            except Exception as error:  # else it would be taken for being read for good
                log.exception("the files of a LoRA adapter could not be read")
                found = ("", f"its files cannot be read: {error!r}")
        with self._lock:
            self._found[files] = found
