"""A mutant written by hand: the whole new sources of some files."""

from dataclasses import dataclass
from functools import cached_property

from epmoe.mutants.tokens import Token


@dataclass(frozen=True, eq=False)
class Edit:
    """What somebody made of the kernels; has what command.py and hunt.py ask of a tokens.Mutant.

    edits: {file: new source}. lines: {file: numbers of the old source's lines that change}.
    """

    name: str
    edits: dict
    lines: dict
    kind = "patch"
    seen_by = None

    @property
    def key(self):
        """Its name."""
        return self.name

    change = key

    @cached_property
    def token(self):
        """Where its first change stands."""
        file = min(self.lines)
        return Token(file, "", self.name, 1, max(1, min(self.lines[file])), 0, 0)
