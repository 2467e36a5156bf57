"""Models from the Hugging Face hub: one snapshot into the hub's own cache.

Decides which files of a repository are needed and how a failure reads. It must never run code from a repository.
"""

from __future__ import annotations

from pathlib import Path

from kvxfer.engine.model_store import check_config
from kvxfer.errors import ConfigError

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")


def snapshot(model: str) -> Path:
    """Download ``model`` (``owner/name``), its config first, and return its directory. Raises ConfigError."""
    import huggingface_hub

    path = Path()
    for patterns in (("config.json",), WANTED):
        try:
            path = Path(huggingface_hub.snapshot_download(model, allow_patterns=list(patterns)))
        except Exception as error:  # the hub client raises its own, the HTTP client's and the system's errors
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise ConfigError(f"model {model} cannot be fetched from the hub: {reason}") from error
        check_config(path)
    return path
