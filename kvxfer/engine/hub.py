"""Models from the Hugging Face hub: one snapshot into the hub's own cache.

Decides which files of a repository are needed and how a failure reads. It must never run code from a repository.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvxfer import places
from kvxfer.engine.model_files import check_config
from kvxfer.errors import ConfigError

CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
INSTEAD = "HF_HOME, XDG_CACHE_HOME or HOME"
WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")


def check_cache_has_a_place() -> None:
    """Raise ConfigError where the hub's client would make a directory called ``~`` in the working directory."""
    if not any(os.environ.get(name) for name in CACHE_VARIABLES) and places.home() is None:
        raise ConfigError(
            f"there is no place for models of the hub: user id {os.getuid()} has no home directory; set {INSTEAD}"
        )


def snapshot(model: str) -> Path:
    """Download ``model`` (``owner/name``), its config first, and return its directory. Raises ConfigError."""
    check_cache_has_a_place()
    import huggingface_hub

    path = Path()
    for patterns in (("config.json",), WANTED):
        try:
            path = Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))
        except Exception as error:  # the hub client raises its own, the HTTP client's and the system's errors
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            is_place = isinstance(error, OSError) and error.errno in places.NOT_WRITABLE and error.filename
            hint = f"; {INSTEAD} names another place" if is_place else ""
            raise ConfigError(f"model {model} cannot be fetched from the hub: {reason}{hint}") from error
        check_config(path)
    return path
