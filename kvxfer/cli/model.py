"""``kvxfer model``: fetch or build a model, list what is in the cache, remove it.

Decides nothing about where models come from or what makes one complete: that is ``kvxfer.engine.model_store``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from kvxfer.cli.console import ProgressBar, size, table
from kvxfer.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument(
        "name", nargs="?", help="known model, hub id or local directory to fetch (default: the model of the demo)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="list the models in the cache")
    action.add_argument("--remove", metavar="NAME", help="remove a model from the cache")


def run(args: argparse.Namespace) -> int:
    from kvxfer.engine import model_store

    models = model_store.default_cache_dir() / "models"
    if args.list:
        return _list(models)
    if args.remove is not None:
        return _remove(models, args.remove)
    name = args.name or model_store.DEFAULT_MODEL
    progress = ProgressBar(of=name)
    try:
        path = model_store.resolve(name, progress=progress)
    finally:
        progress.close()
    print(table([["path", str(path)], ["size", size(_bytes_in(path))]], indent=""))
    return 0


def _bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _cached(models: Path) -> list[Path]:
    if not models.is_dir():
        return []
    return sorted(path for path in models.iterdir() if path.is_dir() and not path.name.startswith("."))


def _list(models: Path) -> int:
    found = _cached(models)
    if not found:
        print(f"no models in {models}")
        return 0
    print(table([[path.name, size(_bytes_in(path)), str(path)] for path in found], indent=""))
    return 0


def _remove(models: Path, name: str) -> int:
    path = next((path for path in _cached(models) if path.name == name), None)
    if path is None:
        raise ConfigError(f"there is no model {name!r} in {models}")
    freed = _bytes_in(path)
    shutil.rmtree(path)
    print(f"removed {path} ({size(freed)})")
    return 0
