"""What the Helm chart gives to SGLang, asked of the installed one: flags, variables, the route of its probes."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib

from tests.support.helm import engine_flags


def source(*parts: str) -> str:
    """The text of a module of SGLang."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return pathlib.Path(spec.submodule_search_locations[0], *parts).read_text()


def test_the_charts_flags_are_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert known >= engine_flags.SGLANG_FLAGS


def test_the_charts_probes_variables_and_numbers_are_sglangs() -> None:
    assert f'@app.get("{engine_flags.HEALTH}")' in source("srt", "entrypoints", "http_server.py")
    words = source("srt", "utils", "network.py") + source("srt", "environ.py")
    assert all(name in words for name in engine_flags.SGLANG_VARIABLES)
    from sglang.srt import observability

    metrics = "".join(path.read_text() for path in pathlib.Path(next(iter(observability.__path__))).rglob("*.py"))
    assert f'"{engine_flags.SGLANG_WAITING}"' in metrics
