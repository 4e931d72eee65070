"""On which sides of the kernels' thresholds the worlds are, recorded while they run.

A threshold is a number of the kernels that has a name (MOST_PARTS, tuning.few_tokens), in a comparison or as one of two
arguments of min or max. An edit that is off by one there changes nothing unless some world is near the threshold.
"""

import ast
import operator
import re
from functools import lru_cache
from typing import NamedTuple

from epmoe.mutants import edited_kernels
from epmoe.mutants.hunt import run_of
from epmoe.mutants.random_worlds import named
from epmoe.mutants.token_mutations import called

LOOK = "look__"
OPERATORS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
BY_NAME = {kind.__name__: op for kind, op in OPERATORS.items()} | dict(min=min, max=max)
NUMBER = re.compile(r"[A-Z][A-Z0-9_]{2,}$")
BELOW, AT, ABOVE = -1, 0, 1

EXPLAINED = {  # name of a number, or a whole comparison -> why worlds stay on one side of it
    "ANNOUNCED": "a value of a word that waits for its peer, used in reports of expired waits",
    "MAX_GPUS_PER_NODE": "above it the host refuses",
    "MAX_THREADS": "above it the host refuses",
    "MAX_TOP_K": "above it the host refuses",
    "WARP": "below it the host refuses",
    "lamport_bytes": "64 MiB of windows are too many for a world",
    "lamport_tokens": "where the host asks: the ranks of the simulator share one kernel",
}


class Threshold(NamedTuple):
    """names: of the numbers. what: the operator, min or max. turned: whether the threshold is the left operand."""

    names: frozenset
    what: str
    turned: bool

    def is_crossed(self, worlds):
        """Whether worlds {side: names} are enough for both outcomes."""
        sides = [side for side in (BELOW, AT, ABOVE) if worlds[side]]
        if self.what in ("min", "max"):
            return BELOW in sides and ABOVE in sides
        return len({BY_NAME[self.what](-s if self.turned else s, 0) for s in sides}) == 2


class _Marker(ast.NodeTransformer):
    """Puts calls of look__ in place of the thresholds in functions. found: {(file, line, text): Threshold}."""

    def __init__(self, file, tree):
        self.file, self.found, self.depth = file, {}, 0
        self.aliases = _aliases(tree)

    def visit_FunctionDef(self, node):
        """Skip numbers that are compared when a module is made: they are no thresholds."""
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    def visit_Compare(self, node):
        kinds = [type(op) for op in node.ops]
        operands = [node.left, *node.comparators]
        if len(kinds) != 1 or kinds[0] not in OPERATORS:
            return self.generic_visit(node)
        return self._marked(node, kinds[0].__name__, operands)

    def visit_Call(self, node):
        name = called(node)
        if name not in ("min", "max") or len(node.args) != 2:
            return self.generic_visit(node)
        return self._marked(node, name, node.args)

    def _marked(self, node, what, operands):
        sides = [_names(operand, self.aliases) for operand in operands]
        names, site = sides[0] | sides[1], (self.file, node.lineno, ast.unparse(node))
        guards = isinstance(node, ast.Call) and any(isinstance(v, ast.Constant) for v in operands)
        self.generic_visit(node)
        if not names or not self.depth or guards:
            return node
        # sides are the quantity's relative to the threshold, whichever comes first
        turned = bool(sides[0]) and not sides[1]
        self.found[site] = Threshold(names, what, turned)
        given = [ast.Constant(v) for v in (site, what, turned)]
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else list(node.args)
        return ast.copy_location(ast.Call(ast.Name(LOOK, ast.Load()), [*given, *operands], []), node)


def _aliases(tree):
    """[(line, variable, name of the number)] for the variables that hold a named number."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, v in zip(target.elts, value.elts) if both else [(target, value)]:
                is_plain = isinstance(name, ast.Name) and isinstance(v, (ast.Name, ast.Attribute))
                if is_plain and _names(v, ()):
                    found.append((node.lineno, name.id, next(iter(_names(v, ())))))
    return sorted(found)


def _names(node, aliases):
    """Named numbers in an expression, outside calls other than casts."""
    if isinstance(node, ast.Name):
        held = [n for line, name, n in aliases if name == node.id and line < node.lineno]
        return {held[-1]} if held else {node.id} if NUMBER.match(node.id) else set()
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        owner = node.value.id if isinstance(node.value, ast.Name) else owner
        return {node.attr} if NUMBER.match(node.attr) or owner in ("tuning", "sending") else set()
    if isinstance(node, ast.BinOp):
        return _names(node.left, aliases) | _names(node.right, aliases)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _names(node.args[0], aliases)
    return set()


def marked(file, source):
    """(code with calls at each threshold, {(file, line, text): Threshold})."""
    tree = ast.parse(source)
    marker = _Marker(file, tree)
    tree = ast.fix_missing_locations(marker.visit(tree))
    return compile(tree, str(edited_kernels.FOLDER / file), "exec"), marker.found


@lru_cache(None)
def _all_marked():
    return {file: marked(file, edited_kernels.source_of(file)) for file in edited_kernels.files()}


def thresholds():
    """{(file, line, text): Threshold} of the kernels."""
    return {site: one for _, found in _all_marked().values() for site, one in found.items()}


def sides_in(name):
    """(the name, {threshold: sides on which this world is}). The kernels are not edited, and must pass."""
    seen = {}

    def look(site, what, turned, a, b):
        side = int(a > b) - int(a < b)
        seen.setdefault(site, set()).add(-side if turned else side)
        return BY_NAME[what](a, b)

    world = named(name)
    codes = {file: code for file, (code, _) in _all_marked().items()}
    kernels = edited_kernels.load(codes, constants=world.constants, names={LOOK: look})
    run_of(world, kernels, 0, racecheck=False).go()
    return name, seen


def crossings(seen):
    """[(threshold, {side: names of worlds})] for all thresholds. seen: {world's name: sides_in() of it}."""

    def worlds(site, side):
        return [name for name, sides in seen.items() if side in sides.get(site, ())]

    return [(site, {side: worlds(site, side) for side in (BELOW, AT, ABOVE)}) for site in sorted(thresholds())]


def uncrossed(found):
    """The thresholds of crossings() that no world crosses and EXPLAINED does not explain.

    A comparison must come out both ways, and min and max must take each argument.
    """
    known = thresholds()
    return [
        site
        for site, worlds in found
        if not {site[2], *known[site].names} & set(EXPLAINED) and not known[site].is_crossed(worlds)
    ]
