"""Prints the facts of engines that vLLM would make of such arguments, without starting one: a JSON list of its
EngineArgs in, a JSON list of facts out. Run by vLLM's own Python, with the repository on PYTHONPATH."""

from __future__ import annotations

import json
import sys

from kvxfer.connectors.vllm.facts import engine_facts


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs

    facts = [engine_facts(EngineArgs(**arguments).create_engine_config()) for arguments in json.loads(sys.argv[1])]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
