"""The Dockerfile, read: its stages, each with its instructions. Decides nothing about what they must be."""

from __future__ import annotations

import dataclasses
import pathlib
import re

PATH = pathlib.Path(__file__).resolve().parents[2] / "Dockerfile"


@dataclasses.dataclass
class DockerStage:
    """``base``: what it begins from."""

    base: str
    instructions: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        """What follows each instruction of that name, in one line."""
        return [words for one, words in self.instructions if one == name]

    def variables(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", " ".join(self.all("ENV"))))


def text() -> str:
    """Without comments, each instruction in a line."""
    kept = "".join(line for line in PATH.read_text().splitlines(keepends=True) if not line.lstrip().startswith("#"))
    return re.sub(r"\\\n\s*", " ", kept)


def arguments() -> dict[str, str]:
    """Of the whole file, with their defaults: those before the first stage."""
    return dict(re.findall(r"^ARG (\w+)=(\S*)$", text().partition("\nFROM ")[0], re.MULTILINE))


def stages() -> dict[str, DockerStage]:
    """By name, in the order of the file."""
    found: dict[str, DockerStage] = {}
    for part in re.split(r"^FROM ", text(), flags=re.MULTILINE)[1:]:
        head, *rest = [line for line in part.splitlines() if line.strip()]
        base, _, name = head.split()
        found[name] = DockerStage(base, [(line.split()[0], line.partition(" ")[2].strip()) for line in rest])
    return found
