"""How SGLang finds the backend, and what it says where that cannot work."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang import plugin, versions
from kvxfer.connectors.sglang.limits import ONLY, check_arguments
from kvxfer.connectors.sglang.updates import Updates
from kvxfer.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def test_importing_it_imports_no_sglang() -> None:
    code = "import sys, kvxfer, kvxfer.connectors.sglang.plugin as p; assert not {'sglang', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_name_is_known_everywhere(world: Any) -> None:
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.disaggregation.utils import TransferBackend, get_kv_class
    from sglang.srt.server_args import DISAGG_TRANSFER_BACKEND_CHOICES

    plugin.register()
    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("kvxfer") == 1
    assert [member.value for member in TransferBackend].count("kvxfer") == 1
    assert prefill.get_kv_class is decode.get_kv_class is get_kv_class
    assert world.classes["manager"].__name__ == "KvxferManager"


def test_other_backends_are_left_alone() -> None:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    assert get_kv_class(TransferBackend.FAKE, KVClassType.SENDER).__name__ == "FakeKVSender"


@pytest.mark.parametrize(
    ("params", "is_refused"),
    [({"n": 2}, True), ([{"n": 2}], True), ({"n": 1}, False), ({"beam_width": 2}, True), ({}, False)],
)
def test_several_answers_to_one_prompt_are_refused_as_sglang_reads_the_request(params: Any, is_refused: bool) -> None:
    """Its HTTP server answers such an error with 400."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    text: Any = ["a"] if isinstance(params, list) else "a"

    def read(room: int | None) -> None:
        GenerateReqInput(text=text, sampling_params=params, bootstrap_room=room).normalize_batch_and_arguments()

    read(None)
    if not is_refused:
        return read(7)
    with pytest.raises(ValueError, match="a prefill and a decode server give one answer"):
        read(7)
    return None


@pytest.mark.parametrize("name", plugin.UPDATES_OF)
def test_a_change_of_weights_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    heard: list[str] = []
    monkeypatch.setattr(plugin, "UPDATES", Updates())
    plugin.UPDATES.listen(heard.append)
    with pytest.raises((AttributeError, TypeError)):
        getattr(SchedulerWeightUpdaterManager, name)(None, None)
    assert heard == [f"SGLang changed the weights in memory ({name})"]


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.5.23.dev1", "nonsense"])
def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    for kind in (KVClassType.MANAGER, KVClassType.BOOTSTRAP_SERVER):
        refusing = get_kv_class(TransferBackend("kvxfer"), kind)
        with pytest.raises(ConfigError, match=f"does not know SGLang {version}; it knows 0.5.23"):
            refusing("127.0.0.1", 1)


def test_builds_of_a_known_version_are_known() -> None:
    assert versions.adapter_of("0.5.23.post1") == versions.adapter_of("0.5.23")


def test_a_bad_option_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    monkeypatch.setenv("KVXFER_SGLANG_LANES", "pigeon")
    with pytest.raises(ConfigError, match="KVXFER_SGLANG_LANES"):
        get_kv_class(TransferBackend("kvxfer"), KVClassType.MANAGER)()


@pytest.mark.parametrize("name", [name for name, _, _ in ONLY])
def test_settings_that_do_not_work_are_refused_by_name(name: str) -> None:
    wanted = next(value for field, value, _ in ONLY if field == name)
    wrongs = {bool: True, int: 0.5 if "threshold" in name else 2, str: "prefill_complete", type(None): "a=b"}
    wrong = wrongs[type(wanted)]
    check_arguments(SimpleNamespace(**{name: wanted}))
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")) as caught:
        check_arguments(SimpleNamespace(**{name: wrong}))
    assert str(wrong) in str(caught.value)


def test_sglang_tells_a_transfer_nothing_of_an_adapter() -> None:
    """If this fails LoRA may be compared, and needs not be refused any more."""
    from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

    told: set[str] = set()
    for kind in (BaseKVSender, BaseKVReceiver, CommonKVSender, CommonKVReceiver):
        for name in ("__init__", "init", "send", "send_metadata"):
            if hasattr(kind, name):
                told |= set(inspect.signature(getattr(kind, name)).parameters)
    assert told == {
        *("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank", "prefill_dp_rank"),
        *("num_kv_indices", "aux_index", "kv_indices", "state_indices", "num_kv_tokens", "indices_event"),
        *("decode_prefix_len", "destination", "device_kv_indices"),
    }


REFUSED = {
    ("--tokenizer-worker-num", "2"): "works with --tokenizer-worker-num 1 only, not 2",
    ("--load-format", "dummy"): "does not work with --load-format dummy, which reads no files",
}


def test_unsupported_flags_are_refused_by_the_main_process(model: Any) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    command += ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "kvxfer"]
    command += ["--attention-backend", "torch_native", "--host", "127.0.0.1"]
    with contextlib.ExitStack() as stack:  # they import at once
        started = {}
        for flags in REFUSED:
            process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
            started[flags] = stack.enter_context(process)
            stack.callback(process.kill)
        for flags, says in REFUSED.items():
            assert says in started[flags].communicate(timeout=120)[1]
            assert started[flags].returncode != 0
