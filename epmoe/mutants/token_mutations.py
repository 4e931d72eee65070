"""Finds every synchronising token of a kernel's source in the syntax tree, and the ways to break it.

| kind | what is done to the source |
|---|---|
| order | acq_rel becomes acquire, release, relaxed; acquire and release become relaxed |
| scope | sys becomes gpu, cta; gpu becomes cta |
| plain | a strong load, store or read-modify-write becomes weak |
| barrier | a syncthreads, syncwarp, fence or wait for bulk copies is removed; syncthreads_or(p) becomes p |
| reset | a store of a constant is removed |
| wait | a call of one of wait.py's waits is removed, as if it had succeeded at once |
| nc | an ordinary vector load uses the non-coherent path |
"""

import ast
import re
from dataclasses import dataclass, replace
from functools import lru_cache

STRONG = re.compile(r"(ld|st|red_add|atomic_(?:add|max|or|cas))_(relaxed|acquire|release|acq_rel)_(cta|gpu|sys)_(\w+)$")
WEAKER = {"acq_rel": ("acquire", "release", "relaxed"), "acquire": ("relaxed",), "release": ("relaxed",), "relaxed": ()}
NARROWER = {"sys": ("gpu", "cta"), "gpu": ("cta",), "cta": ()}
NO_CTA = ("atomic_max", "atomic_or", "atomic_cas")  # these have no scope cta
BARRIERS = re.compile(
    r"(syncthreads|syncwarp|fence_\w+|bulk_(wait|wait_read|commit)|griddep_wait"
    r"|shmem_(quiet|fence))$"
)
VOTES = ("syncthreads_or", "syncthreads_count")
STORE = re.compile(r"store(_(u8|u16|i32|u32|u64|f32)|16)$")
CASTS = ("i32", "u32", "u64", "f32")
SUCCESS = {
    "wait_for_own_blocks": "True",
    "wait_for_flag": "True",
    "wait_for_signal": "u64(0)",
    "wait_below": "u64(0)",
    "wait_for_counter": "True",
    "mbar_try_wait": "True",
}
# Shared modules. Each user gets its own mutants, since one may need a synchronisation that another does not.
PER_IMPORTER = ("params", "wait", "pairs/peers", "plain/waits", "plain/peers")


@dataclass(frozen=True)
class Token:
    """One place of the source: `text` at (line, column), inside `function` of `file` (relative to the package).

    start, end: offsets in the source. number: its place among tokens with the same text in the function, from 1.
    is_statement: a whole statement; otherwise part of an expression.
    """

    file: str
    function: str
    text: str
    number: int
    line: int
    start: int
    end: int
    is_statement: bool = False

    @property
    def place(self):
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Mutant:
    """A token and its replacement. seen_by: for tokens of PER_IMPORTER, the one module that sees the change."""

    token: Token
    kind: str
    new: str
    seen_by: str | None = None

    @property
    def change(self):
        """ "st_release_sys_u64 -> st_relaxed_sys_u64" """
        new = " ".join(self.new.split())
        return f"{' '.join(self.token.text.split())} -> {new if new != 'pass' else 'nothing'}"

    @property
    def key(self):
        """Its name in harmless.py. It has no line number, so edits elsewhere in the file do not change it."""
        number = f" (number {self.token.number})" if self.token.number > 1 else ""
        seen = f", seen by {self.seen_by}" if self.seen_by else ""
        return f"{self.token.file} {self.token.function}: {self.change}{number}{seen}"

    def apply(self, source):
        """The edited source. Lines keep their numbers."""
        lost = source.count("\n", self.token.start, self.token.end) - self.new.count("\n")
        new = self.new + "\n" * lost
        if lost and not self.token.is_statement:
            new = f"({new})"
        return source[: self.token.start] + new + source[self.token.end :]


class _Finder(ast.NodeVisitor):
    """Collects (kind, node whose text is replaced, replacements)."""

    def __init__(self, source):
        self.source, self.found, self.functions, self.called = source, [], [], set()

    def add(self, kind, node, *new):
        if new:
            self.found.append((kind, node, ".".join(self.functions), new))

    def visit_FunctionDef(self, node):
        self.functions.append(node.name)
        for child in node.body:
            self.visit(child)
        self.functions.pop()

    def visit_ImportFrom(self, node):
        pass

    def visit_Expr(self, node):
        name = called(node.value)
        if BARRIERS.match(name):
            self.add("barrier", node, *(["bulk_wait_read()"] if name == "bulk_wait" else []), "pass")
        elif stores_constant(node):
            self.add("reset", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if stores_constant(node) and self.functions:
            self.add("reset", node, "pass")
        made = [] if self.functions else [t.id for t in node.targets if isinstance(t, ast.Name)]
        self.functions += made  # a function that a call makes has the name it is given
        self.generic_visit(node)
        del self.functions[len(self.functions) - len(made) :]

    def add_strong(self, node):
        """A strong intrinsic, called or passed to a function that calls it."""
        op, order, scope, kind = STRONG.match(node.id).groups()
        self.add("order", node, *(f"{op}_{weaker}_{scope}_{kind}" for weaker in _orders(op, order)))
        self.add(
            "scope",
            node,
            *(f"{op}_{order}_{narrow}_{kind}" for narrow in NARROWER[scope] if not (narrow == "cta" and op in NO_CTA)),
        )
        self.add("plain", node, {"ld": "load_", "st": "store_"}.get(op, f"plain_{op}_") + kind)

    def visit_Call(self, node):
        name = called(node)
        # waits.wait_for_flag(...)
        if isinstance(node.func, ast.Attribute) and node.func.attr in SUCCESS:
            name = node.func.attr
        self.called.add(node.func)
        if STRONG.match(name):
            self.add_strong(node.func)
        elif name == "shared_add_i32":
            self.add("plain", node.func, "plain_shared_add_i32")
        elif name in VOTES:
            self.add("barrier", node, f"({ast.get_source_segment(self.source, node.args[0])})")
        elif name in SUCCESS:
            self.add("wait", node, SUCCESS[name])
        self.generic_visit(node)

    def visit_Name(self, node):
        if STRONG.match(node.id) and isinstance(node.ctx, ast.Load) and node not in self.called:
            self.add_strong(node)
        if node.id == "load16" and isinstance(node.ctx, ast.Load) and self.functions:
            self.add("nc", node, "load16_nc")


def _orders(op, order):
    return ("relaxed",) if op == "atomic_cas" and order == "acq_rel" else WEAKER[order]


def called(node):
    """The name of the function that a node calls; "" if it calls none by its name."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def stores_constant(statement):
    """Whether a statement stores a constant, by an intrinsic or in an element of an array."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.targets[0], ast.Subscript) and _is_constant(statement.value)
    call = getattr(statement, "value", None)
    return STORE.match(called(call)) and all(map(_is_constant, call.args[1:]))


def _is_constant(node):
    """A number, a name in capitals, or a cast of one."""
    if called(node) in CASTS:
        return all(map(_is_constant, node.args))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    return isinstance(node, ast.Constant) or isinstance(node, ast.Name) and node.id.isupper()


_tree = lru_cache(None)(ast.parse)


def spans(source):
    """A function that gives a node's (start, end) in the source. Columns of the tree are bytes."""
    raw, starts = source.encode(), [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        return tuple(len(raw[: starts[line - 1] + column].decode()) for line, column in ends)

    return span


@lru_cache(None)
def mutants_of(file, source):
    """All mutants of one source file, in line order."""
    finder = _Finder(source)
    finder.visit(_tree(source))
    span, made, seen = spans(source), [], {}
    for kind, node, function, replacements in finder.found:
        start, end = span(node)
        text = source[start:end]
        places = seen.setdefault((function, text), [])
        if start not in places:
            places.append(start)
        token = Token(
            file, function, text, places.index(start) + 1, node.lineno, start, end, isinstance(node, ast.stmt)
        )
        made += [Mutant(token, kind, new) for new in replacements]
    return tuple(sorted(made, key=lambda m: m.token.start))


def for_importers(mutants, importers):
    """Mutants of PER_IMPORTER, once for each module that uses them. importers: function (mutant) -> stems."""
    out = []
    for m in mutants:
        shared = m.token.file.removesuffix(".py") in PER_IMPORTER
        out += [replace(m, seen_by=stem) for stem in sorted(importers(m))] if shared else [m]
    return out


@lru_cache(None)
def names_in(source):
    """Every name and attribute that a source uses, except in imports. Modules of its own package do not count."""
    nodes = list(ast.walk(_tree(source)))
    modules = {
        alias.asname or alias.name
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.level and not n.module
        for alias in n.names
    }
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return (names - modules) | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@lru_cache(None)
def imports_of(source, module):
    """Names that a source imports from a sibling. If it imports the whole module, the attributes that it uses."""
    tree, found, module = _tree(source), set(), module.rpartition("/")[2]
    for n in tree.body:
        if isinstance(n, ast.ImportFrom) and n.level:
            names = {alias.name for alias in n.names}
            if n.module and n.module.rpartition(".")[2] == module:
                found |= names
            elif not n.module and module in names:
                found |= {
                    a.attr
                    for a in ast.walk(tree)
                    if isinstance(a, ast.Attribute) and isinstance(a.value, ast.Name) and a.value.id == module
                } | {"make"}
    return found


@lru_cache(None)
def entrances(source, function):
    """The names through which other modules can run `function` (dotted if nested).

    These are its own name, its callers', and names in a namespace: namespace(signal=signal_near).
    """
    inside = {n.name: names_in(ast.unparse(n)) for n in ast.walk(_tree(source)) if isinstance(n, ast.FunctionDef)}
    for n in _tree(source).body:
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            inside[n.targets[0].id] = names_in(ast.unparse(n.value))
    for n in ast.walk(_tree(source)):
        if isinstance(n, ast.keyword) and n.arg and isinstance(n.value, ast.Name):
            inside[n.arg] = inside.get(n.arg, set()) | {n.value.id}
    reached = {function.rpartition(".")[2]}
    while more := {name for name, used in inside.items() if name not in reached and used & reached} - {"make"}:
        reached |= more
    return reached
