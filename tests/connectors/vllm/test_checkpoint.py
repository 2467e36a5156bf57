"""What a checkpoint is: its files, whatever vLLM calls it by."""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.common.checkpoint import WHY_MAX, ModelName, NotKnown, unknown, weight_files
from kvxfer.connectors.vllm.models import models_of
from kvxfer.rpc.convert import write_pools
from kvxfer.types import CompatibilityRecord, Exposure, PoolRecord, why_unknown

RECORD = CompatibilityRecord("m", "c", "w", "f32", 1, 1, 1, 1, "page:HNC", "", "", "none")
REVISION = "0123456789abcdef0123456789abcdef01234567"


def make(directory: pathlib.Path, *names: str) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_bytes(name.encode())
    return directory


def config(**changes: Any) -> SimpleNamespace:
    load = SimpleNamespace(load_format=changes.pop("load_format", "auto"), download_dir=None)
    model = SimpleNamespace(**{"model": "/m", "revision": None, **changes})
    return SimpleNamespace(load_config=load, model_config=model, speculative_config=None)


def test_weight_files_of_a_directory_are_all_that_hold_weights(tmp_path: pathlib.Path) -> None:
    weights = ("a.safetensors", "b.bin", "c.pt", "d.pth", "e.gguf", "f.npz", "G.BIN")
    make(tmp_path, *weights, "config.json", "tokenizer.json", "optimizer.pt", "training_args.bin")
    (tmp_path / "folder.bin").mkdir()
    assert [pathlib.Path(path).name for path in weight_files(ModelName(str(tmp_path)))] == sorted(weights)


def test_weight_files_of_one_file_are_that_file(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "a.gguf", "b.gguf")
    assert weight_files(ModelName(str(tmp_path / "a.gguf"))) == [str(tmp_path / "a.gguf")]


def test_weight_files_of_a_directory_without_any_are_not_known(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotKnown, match="has no weight files"):
        weight_files(ModelName(str(make(tmp_path, "config.json"))))


@pytest.mark.parametrize("revision", ["", "main", REVISION])
@pytest.mark.parametrize("name", ["org/model", "org/model:Q4_K_M"])
def test_weight_files_of_a_hub_name_are_those_of_the_snapshot(name: str, revision: str, tmp_path: pathlib.Path) -> None:
    repository = tmp_path / "models--org--model"
    snapshot = make(repository / "snapshots" / REVISION, "model.safetensors", "config.json")
    make(repository / "snapshots" / ("f" * 40), "other.safetensors")
    make(repository / "refs")
    (repository / "refs" / "main").write_text(REVISION)
    found = weight_files(ModelName(name, revision, str(tmp_path)))
    assert found == [str(snapshot / "model.safetensors")]


def test_weight_files_of_a_hub_name_that_is_not_here_are_not_known(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotKnown, match="no snapshot of it is on this host"):
        weight_files(ModelName("org/model", "", str(tmp_path)))


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "modelexpress", "ipc_cache", "of a plugin"])
def test_models_of_a_loader_that_reads_no_files_are_not_known(load_format: str) -> None:
    with pytest.raises(NotKnown, match=load_format):
        models_of(config(load_format=load_format))


def test_models_whose_weights_are_streamed_are_not_known() -> None:
    with pytest.raises(NotKnown, match="s3://bucket/model"):
        models_of(config(load_format="runai_streamer", model_weights="s3://bucket/model"))


def test_models_of_an_engine_are_its_own_and_its_draft() -> None:
    engine = config(revision="main")
    assert models_of(engine) == [ModelName("/m", "main", None)]
    engine.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model="/d", revision=None))
    assert models_of(engine) == [ModelName("/m", "main", None), ModelName("/d", "", None)]
    engine.speculative_config.draft_model_config = engine.model_config
    assert models_of(engine) == [ModelName("/m", "main", None)]


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("404\n\nRepository Not Found\r\n", "404 Repository Not Found"),
        ("/m/caf\udce9 is younger", "/m/caf\\udce9 is younger"),
        ("a\x00b\x1b[1m\x7f", "ab[1m"),
        ("\u5b57" * WHY_MAX, ("\\u5b57" * WHY_MAX)[:WHY_MAX]),
    ],
    ids=["lines", "a path that is not UTF-8", "control characters", "too long"],
)
def test_unknown_whatever_its_reason_can_be_sent(why: str, text: str) -> None:
    fingerprint = unknown(why)
    assert why_unknown(fingerprint) == text
    record = dataclasses.replace(RECORD, weights_fingerprint=fingerprint)
    write_pools([PoolRecord(0, record, 8, 64, Exposure.POOL, True)])
