"""Draws the state tables of the native core into docs/safety.md, between its marks, from what the core says.

python docs/make_state_diagrams.py           write
python docs/make_state_diagrams.py --check   exit 1 where the page does not say what the core says
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from kvxfer._native import _core

PAGE = pathlib.Path(__file__).with_name("safety.md")


def diagram(rows: list[tuple[Any, Any, Any]], begin: str, final: set[str]) -> str:
    """A mermaid state diagram: one arrow a pair of states with all the events that lead along it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, event, after in rows:
        if after is not None and state.name not in final:
            arrows.setdefault((state.name, after.name), []).append(event.name.lower())
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {begin}"]
    lines += [f"    {state} --> {after}: {', '.join(events)}" for (state, after), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in sorted(final)]
    return "\n".join([*lines, "```"])


def diagrams() -> dict[str, str]:
    """By marker name."""
    grants, transfers, pushes = _core.grant_transitions(), _core.transfer_transitions(), _core.push_transitions()
    final = {"COMMITTED", "FAILED", "CANCELLED"}
    ended = {state.name for state, _, _ in grants} - {"ALIVE"}
    return {
        "grant": diagram(grants, "ALIVE", ended),
        "transfer": diagram(transfers, "CONNECTING", final),
        "push": diagram(pushes, "CONNECTING", final),
    }


def drawn(page: str) -> str:
    """``page`` with every marked part drawn anew."""
    for name, text in diagrams().items():
        begin, end = f"<!-- {name}: made by make_state_diagrams.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{PAGE.name} has no marks for {name!r}")
        page = before + begin + text + "\n" + end + after
    return page


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        if drawn(page) != page:
            print(f"{PAGE.name} is not what the core says; run python docs/make_state_diagrams.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(drawn(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
