"""Parties in a process of their own, to be killed and stopped: reads calls as JSON lines, answers each with one."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from tests.support.faults.parties import Party


def main() -> None:
    parties: dict[str, Party] = {}
    for line in sys.stdin:
        party_name, name, arguments, options = json.loads(line)
        answer: dict[str, Any]
        try:
            if name == "open":
                parties[party_name] = Party(party_name, *arguments, **options)
                answer = {"result": None}
            else:
                answer = {"result": getattr(parties[party_name], name)(*arguments, **options)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for party in parties.values():
        party.close()
    assert threading.main_thread() is threading.current_thread()


if __name__ == "__main__":
    main()
