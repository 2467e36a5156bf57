"""What the Helm chart gives to vLLM, asked of the installed one: flags, and the route that its probes ask."""

from __future__ import annotations

import json
import subprocess

from tests.support.helm import engine_flags
from tests.support.vllm.engines import PYTHON

LOOK = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.instrumentator import health
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers

parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({
    "flags": sorted({flag for action in parser._actions for flag in action.option_strings}),
    "routes": [route.path for route in health.router.routes],
    "metrics": open(loggers.__file__).read(),
}))
"""


def test_the_charts_flags_and_probes_are_vllms() -> None:
    done = subprocess.run([PYTHON, "-c", LOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["flags"]) >= engine_flags.VLLM_FLAGS
    assert engine_flags.HEALTH in found["routes"]
    assert f'"{engine_flags.VLLM_WAITING}"' in found["metrics"]
