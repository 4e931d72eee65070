"""Turns unified diffs (`git diff`) of the kernels into mutants.

Paths may begin at the repository's root, or at any folder above the file, as with `git diff --relative`.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

from epmoe.mutants import edited_kernels
from epmoe.mutants.token_mutations import Token
from epmoe_ref.errors import EPValueError

ROOT = "epmoe/kernels/"
NOWHERE = "/dev/null"
HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
REMEDY = "give a unified diff of the source as it is now, as `git diff` makes it"


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of the kernels, with the interface of token_mutations.Mutant that command.py and hunt.py use.

    key: its name. edits: {file: new source}. lines: {file: numbers of the old source's lines that change}.
    """

    key: str
    edits: dict
    lines: dict
    kind = "patch"
    seen_by = None

    @property
    def change(self):
        return self.key

    @cached_property
    def token(self):
        """The place of its first change."""
        file = min(self.lines)
        return Token(file, "", self.key, 1, max(1, min(self.lines[file])), 0, 0)


@dataclass
class Hunk:
    """Lines with their line ends. at: the header; first: number of the first old line, from 1."""

    at: str
    first: int
    old: list = field(default_factory=list)
    new: list = field(default_factory=list)
    # indices of old lines that are removed or next to new ones
    changed: set = field(default_factory=set)

    def placed(self, lines):
        """Index of its first line in a file: the stated place, else the only place that fits; None if there is none."""
        if not self.old:
            return self.first if self.first <= len(lines) else None
        fits = [i for i in range(len(lines) - len(self.old) + 1) if lines[i : i + len(self.old)] == self.old]
        return self.first - 1 if self.first - 1 in fits else fits[0] if len(fits) == 1 else None


def edit_of(name, text):
    """The Edit for a patch. name: of its file.

    Raises EPValueError if it is no patch, does not apply, changes files outside epmoe/kernels, or leaves invalid Python.
    """
    files = _files(name, text)
    if not files:
        raise EPValueError(f"{name}: holds no change of a file (--- a/..., +++ b/..., @@ ... @@); {REMEDY}")
    edits, lines = {}, {}
    for old, new, hunks in files:
        if NOWHERE in (old, new):
            raise EPValueError(
                f"{name}: makes or deletes {old if new == NOWHERE else new}; a mutant must be a change "
                "of files that are there: put the code into one of them"
            )
        file, source, changed = _apply(name, new, hunks, edits)
        edits[file], lines[file] = source, lines.get(file, set()) | changed
    return Edit(name, edits, lines)


def _files(name, text):
    """[(old path, new path, hunks)] of a patch."""
    out, lines = [], text.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        if lines[i].startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            out.append((*(_path(line) for line in lines[i : i + 2]), []))
            i += 2
        elif out and lines[i].startswith("@@"):
            hunk, i = _hunk(name, lines, i)
            out[-1][2].append(hunk)
        elif lines[i].startswith(("rename from ", "Binary files ", "GIT binary patch")):
            raise EPValueError(f"{name}: {lines[i].strip()!r} does not change lines of a source; {REMEDY}")
        else:
            i += 1
    return [f for f in out if f[2] or NOWHERE in f]


def _path(line):
    path = line[4:].rstrip("\n\r").partition("\t")[0].strip('"')
    return path[2:] if path.startswith(("a/", "b/")) else path


def _hunk(name, lines, i):
    """The Hunk that begins at lines[i], and the index after it."""
    match = HEADER.match(lines[i])
    if not match:
        raise EPValueError(f"{name}: {lines[i].strip()!r} is not the header of a hunk (@@ -5,3 +5,2 @@); {REMEDY}")
    first, n_old, _, n_new = (1 if n is None else int(n) for n in match.groups())
    hunk, i = Hunk(match[0], first), i + 1
    while i < len(lines) and (len(hunk.old) < n_old or len(hunk.new) < n_new or lines[i].startswith("\\")):
        kind, line = lines[i][0], lines[i][1:]
        if kind == "\\":  # no newline at the end of the previous line
            for side in (hunk.old, hunk.new):
                if lines[i - 1][0] in (" ", "-" if side is hunk.old else "+"):
                    side[-1] = side[-1].rstrip("\n")
        elif kind in " \n":  # an editor may have stripped the blank from an empty line
            line = line or "\n"
            hunk.old.append(line)
            hunk.new.append(line)
        elif kind == "-":
            hunk.changed.add(len(hunk.old))
            hunk.old.append(line)
        elif kind == "+":
            hunk.changed |= {len(hunk.old) - 1, len(hunk.old)}
            hunk.new.append(line)
        else:
            break
        i += 1
    if (len(hunk.old), len(hunk.new)) != (n_old, n_new):
        raise EPValueError(
            f"{name}: the hunk {hunk.at} ends after {len(hunk.old)} old and {len(hunk.new)} new lines, "
            f"not {n_old} and {n_new}; {REMEDY}"
        )
    return hunk, i


def _apply(name, path, hunks, edits):
    """(file of epmoe/kernels, its new source, numbers of the old lines that change)."""
    files = edited_kernels.files()
    full = [f for f in files if path.endswith(ROOT + f)]
    found = full or [f for f in files if f"/{ROOT}{f}".endswith(f"/{path}")]
    if not found:
        raise EPValueError(
            f"{name}: {path} is not a source of a kernel; only the files of {ROOT} can be changed by a "
            "mutant: leave the rest out of the patch"
        )
    tried = [(f, *_applied(edits.get(f) or edited_kernels.source_of(f), hunks)) for f in found]
    fits = [t for t in tried if t[1] is not None]
    if len(fits) != 1:
        file, _, hunk = tried[0]
        why = (
            f"the old lines of {hunk.at} are neither there nor at one other place of {file}"
            if not fits
            else f"it fits {' and '.join(f[0] for f in fits)}"
        )
        raise EPValueError(f"{name}: does not apply to {path}: {why}; {REMEDY}, from the repository's root")
    file, new, _ = fits[0]
    if new == edited_kernels.source_of(file):
        raise EPValueError(f"{name}: changes nothing of {ROOT}{file}; {REMEDY}")
    try:
        compile(new, file, "exec")
    except (SyntaxError, ValueError) as error:
        raise EPValueError(
            f"{name}: leaves invalid Python in {ROOT}{file}: line {getattr(error, 'lineno', '?')}: "
            f"{getattr(error, 'msg', error)}; mend the patch"
        ) from None
    return fits[0]


def _applied(source, hunks):
    """(new source, numbers of its old lines that change), or (None, the hunk that does not fit)."""
    lines, changed = source.splitlines(keepends=True), set()
    # from the last hunk to the first, so line numbers stay valid
    for hunk in sorted(hunks, key=lambda h: -h.first):
        at = hunk.placed(lines)
        if at is None:
            return None, hunk
        lines[at : at + len(hunk.old)] = hunk.new
        changed |= {at + 1 + i for i in hunk.changed}
    return "".join(lines), changed
