"""Options from a file, the environment and flags, with one schema."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import pytest

from kvxfer.cli import main, services
from kvxfer.cli.settings import from_environment, from_file
from kvxfer.errors import ConfigError
from kvxfer.router.options import RouterOptions


def settled(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    services.add_arguments(parser, "router")
    args = parser.parse_args(words)
    args.command = "router"
    return services.settled(args)


def written(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_environment_and_that_over_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "port: 1000\nattempts-max: 7\nmax_inflight: 9\ndecode: [http://a:1, http://b:2]\n")
    monkeypatch.setenv("KVXFER_ROUTER_PORT", "2000")
    monkeypatch.setenv("KVXFER_ROUTER_ATTEMPTS_MAX", "8")
    options = settled(f"--config={path}", "--port=3000")
    assert (options.port, options.attempts_max, options.max_inflight) == (3000, 8, 9)
    assert options.decode == ("http://a:1", "http://b:2")
    assert options.request_timeout_s == RouterOptions().request_timeout_s


def test_a_repeated_flag_adds_and_replaces_what_the_file_says(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, "decode: http://a:1")
    assert settled(f"--config={path}").decode == ("http://a:1",)
    both = settled(f"--config={path}", "--decode=http://b:1", "--decode=http://c:1,http://d:1")
    assert both.decode == ("http://b:1", "http://c:1", "http://d:1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense: 1", "'nonsense' is no option|nonsense is no option"),
        ("port: many", "port must be a whole number, not 'many'"),
        ("forward_authorization: 3", "must be true or false"),
        ("port: 1\nport-: 2", "no option"),
        ("- a\n- b", "must be a mapping"),
        ("port: [1", "is not YAML"),
        ("port: {a: 1}", "port must be a whole number"),
        ("decode: [{a: 1}]", r"decode\[0\] must be a word"),
        ("a: &a [*a]", "no option"),
        ("port: 80\nport: 90", "port is given twice"),
        ("max-inflight: 80\nmax_inflight: 90", "max_inflight is given twice"),
        ("request_timeout_s: true", "request_timeout_s must be a number, not True"),
        ("port: on", "port must be a whole number, not True"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: pathlib.Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_file(RouterOptions, written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        from_file(RouterOptions, str(tmp_path / "none.yaml"))


def test_words_that_yaml_reads_as_truth_are_words_where_an_option_has_words(tmp_path: pathlib.Path) -> None:
    assert from_file(RouterOptions, written(tmp_path, "local_prefill: off")) == {"local_prefill": "off"}
    assert from_file(RouterOptions, written(tmp_path, "insecure: yes")) == {"insecure": True}


def test_an_empty_file_says_nothing(tmp_path: pathlib.Path) -> None:
    assert from_file(RouterOptions, written(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(("name", "text"), [("PORT", "x"), ("INSECURE", "perhaps")])
def test_a_wrong_variable_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"KVXFER_ROUTER_{name}"):
        from_environment(RouterOptions, "router", {f"KVXFER_ROUTER_{name}": text})


def test_check_config_prints_what_would_be_used_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--check-config", "--coordinator=127.0.0.1:7", "--port=81"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["coordinator"], printed["port"]) == ("127.0.0.1:7", 81)
    assert main(["router", "--check-config", "--port=99999"]) == 2
    assert "port must be 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "must be given: they name the workers"),
        (("--decode=127.0.0.1:9",), "--decode 127.0.0.1:9: url must be http://"),
        (("--decode=http://127.0.0.1:9", "--decode=http://127.0.0.1:9"), "another worker of that name"),
        (("--decode=http://127.0.0.1:9", "--api-key-file=/nowhere"), "cannot read API keys from /nowhere"),
        (("--decode=http://127.0.0.1:9", "--admin-key-file=/nowhere"), "cannot read API keys from /nowhere"),
        (("--decode=http://127.0.0.1:9", "--worker-api-key-file=/nowhere"), "cannot read the workers' API key"),
        (("--decode=http://127.0.0.1:9", "--forward-header=cookie"), "forward_header: 'cookie' is not for clients"),
        (("--decode=http://127.0.0.1:9", "--worker-ca-file=/nowhere"), "worker_ca_file: cannot use /nowhere"),
        (("--decode=http://127.0.0.1:9", "--tls-cert-file=/nowhere"), "tls_cert_file: cannot use /nowhere"),
        (("--workers-file=/nowhere",), "/nowhere: No such file"),
        (("--decode=http://127.0.0.1:9", "--otlp-endpoint=ftp://x"), "otlp_endpoint"),
        (("--coordinator=127.0.0.1:7", "--token-file=/nowhere"), "cluster token file /nowhere"),
    ],
)
def test_check_config_refuses_what_a_start_would_refuse(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", "--check-config", *flags]) == 2
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""


def test_a_password_in_a_url_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--otlp-endpoint", "--engine"):
        assert main(["router", "--check-config", f"{flag}=http://team:secret@127.0.0.1:4318", "--engine=http://x"]) == 2
        printed = capsys.readouterr()
        assert "secret" not in printed.err + printed.out


def test_a_nul_in_the_file_is_refused_by_the_options_name(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text('api_key_file: "a\\0b"\n')
    assert main(["router", "--check-config", "--config", str(path)]) == 2
    assert "api_key_file must not hold a NUL" in capsys.readouterr().err


def test_a_certificate_file_without_a_certificate_is_refused_in_words(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = written(tmp_path, "")
    assert main(["router", "--check-config", "--decode=http://127.0.0.1:9", f"--tls-cert-file={empty}"]) == 2
    assert "no certificate in PEM form" in capsys.readouterr().err
