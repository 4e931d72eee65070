"""A mutant written by hand, with the new source of each changed file."""

from dataclasses import dataclass
from functools import cached_property

from epmoe.mutants.token_mutations import Token


@dataclass(frozen=True, eq=False)
class Edit:
    """A hand-written change of the kernels, with the interface of tokens.Mutant that command.py and hunt.py use.

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
        """The place of its first change."""
        file = min(self.lines)
        return Token(file, "", self.name, 1, max(1, min(self.lines[file])), 0, 0)
