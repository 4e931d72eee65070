"""Mutants of whole statements. token_mutations.py changes single words.

| kind | what is done to the source |
|---|---|
| swap | two consecutive statements are exchanged; one synchronises, the other accesses memory |
| early | a release or a barrier is moved to the top of its block of statements |
| skip | odd ranks, or every other thread, leave out a reset |
| off by one | a wait, or a comparison with an atomic's result, is off by one |
| twice | an atomic adds 2 instead of 1 |
| whose | a synchronising statement uses another rank's number or another region's words |
| both | a release and the acquire that reads it become relaxed, together (pairs.py finds them by running) |

All but "both" are found from the source alone. harmless.py lists those that change nothing.
"""

import ast
import re
from dataclasses import dataclass

from epmoe.mutants.token_mutations import BARRIERS, STRONG, SUCCESS, VOTES, Token, called, spans, stores_constant

PURE = re.compile(
    r"(i32|u32|u64|f32|min|max|len|range|lane_id|thread_idx|block_idx|block_dim|grid_dim|n_warps|ballot"
    r"|shared_array|ffs|popc|clz|shfl_\w+|warp_\w+|any_lane|all_lanes|mark|globaltimer)$"
)
OF_PARAMETERS = re.compile(r"(u64\(load_u64\()*params\b(?!.*load)")  # read-only for kernels
RANKS = ("my_rank", "owner", "rank", "source", "peer", "src_rank", "to_rank")
SIGNALS = {"signal", "put", "complete"}
WAITS = {"wait_for_counter": 1, "for_blocks": 2, "for_count": 2, "for_flag": 2}  # of modules -> argument waited for
OFFSETS = {"at", "mailbox"}  # objects whose attributes are addresses of words


@dataclass(frozen=True)
class StatementMutation:
    """One edit: `new` instead of source[token.start:token.end]. It has the interface of token_mutations.Mutant.

    lines: (first, last) of the statements. other: a second edit, in any file, that belongs to it.
    """

    token: Token
    kind: str
    new: str
    what: str
    lines: tuple
    other: "StatementMutation | None" = None
    seen_by = None

    @property
    def change(self):
        return self.what

    @property
    def key(self):
        """Its name in harmless.py. It contains no line number."""
        number = f" (number {self.token.number})" if self.token.number > 1 else ""
        return f"{self.token.file} {self.token.function}: {self.kind}: {self.what}{number}"

    def apply(self, source):
        """The edited source. Lines keep their numbers."""
        lost = source.count("\n", self.token.start, self.token.end) - self.new.count("\n")
        return source[: self.token.start] + self.new + "\n" * lost + source[self.token.end :]


class _Source:
    """A file's text, with the offsets of its syntax tree's nodes."""

    def __init__(self, file, text):
        self.file, self.text = file, text
        self.span, self.found, self.seen = spans(text), [], {}

    def of(self, node):
        start, end = self.span(node)
        return self.text[start:end]

    def add(self, kind, function, span, new, what, first, last=None):
        """Add an edit of a span of the text. what: in words, the same for equal edits of a function.

        first, last: the statements that it changes; one of them if last is left out.
        """
        start, end = span
        number = self.seen[function, kind, what] = self.seen.get((function, kind, what), 0) + 1
        token = Token(self.file, function, self.text[start:end], number, first.lineno, start, end)
        self.found.append(StatementMutation(token, kind, new, what, (first.lineno, (last or first).end_lineno)))


def calls(node):
    """Names that are called in a node, except in functions defined inside it."""
    return [name for n in ast.walk(node) if (name := called(n))]


def calls_atomic(node):
    """Whether a node calls an atomic."""
    return any((m := STRONG.match(c)) and m[1].startswith("atomic") for c in calls(node))


def synchronises(node):
    """Whether a statement contains a strong access that may order others, a barrier, a fence, a wait or a signal."""
    return any(
        (m := STRONG.match(c))
        and (m[1], m[2]) != ("ld", "relaxed")
        or BARRIERS.match(c)
        or c.startswith("wait_for")
        or c in VOTES
        or c in SUCCESS
        or c in SIGNALS
        or c == "shared_add_i32"
        for c in calls(node)
    )


def touches_memory(node):
    """Whether a statement may read or write memory that others write."""
    for n in ast.walk(node):
        name = called(n)
        reads_parameters = name.startswith("load_") and OF_PARAMETERS.match(ast.unparse(n.args[0]))
        if isinstance(n, ast.Subscript) or name and not PURE.match(name) and not reads_parameters:
            return True
    return False


def assigned(node):
    """Names that a statement assigns."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def used(node):
    """Names that a node uses."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def independent(a, b):
    """Whether local names allow two statements to be exchanged."""
    return not (assigned(a) & (used(b) | assigned(b)) or assigned(b) & used(a))


def leaves(node):
    """Whether a statement leaves its block, or defines a function."""
    return any(isinstance(n, (ast.Return, ast.Break, ast.Continue, ast.FunctionDef)) for n in ast.walk(node))


def releases(node):
    """Whether a simple statement releases, or is a barrier."""
    return isinstance(node, ast.Expr) and any(
        BARRIERS.match(c) or (m := STRONG.match(c)) and m[2] in ("release", "acq_rel") or c in SIGNALS
        for c in calls(node)
    )


def statement_mutations_of(file, text):
    """All mutants of the statements of one source file except kind "both", in the order of its lines."""
    source = _Source(file, text)
    for function, node in _device_functions(ast.parse(text)):
        names = assigned(node) | {a.arg for n in ast.walk(node) if isinstance(n, ast.FunctionDef) for a in n.args.args}
        for body in _bodies(node):
            _swaps(source, function, body)
            _early(source, function, body)
        from_atomics = _from_atomics(node)
        for statement in _statements(node):
            _skips(source, function, statement, names)
            _wrong_numbers(source, function, statement, names, node, from_atomics)
    return sorted(source.found, key=lambda s: (s.token.start, s.key))


def _device_functions(tree, path=()):
    """(dotted name, node) of the innermost functions. They are the device functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            inside = list(_device_functions(node, (*path, node.name)))
            yield from inside
            if not inside:
                yield ".".join((*path, node.name)), node
        else:
            yield from _device_functions(node, path)


def _bodies(node):
    for n in ast.walk(node):
        for name in ("body", "orelse"):
            if isinstance(getattr(n, name, None), list):
                yield getattr(n, name)


def _statements(node):
    """The simple statements, and the tests of if and while."""
    for n in ast.walk(node):
        if isinstance(n, (ast.Expr, ast.Assign, ast.Return)):
            yield n
        elif isinstance(n, (ast.If, ast.While)):
            yield n.test


def _words(node):
    return " ".join(ast.unparse(node).split("\n")[0].split())[:60]


def _swaps(source, function, body):
    for a, b in zip(body, body[1:]):
        if (
            (synchronises(a) or synchronises(b))
            and touches_memory(a)
            and touches_memory(b)
            and independent(a, b)
            and not leaves(a)
            and not leaves(b)
            and a.end_lineno < b.lineno
        ):
            (start, end), (next_start, next_end) = source.span(a), source.span(b)
            new = source.text[next_start:next_end] + source.text[end:next_start] + source.text[start:end]
            source.add("swap", function, (start, next_end), new, f"{_words(a)} / {_words(b)}", a, b)


def _early(source, function, body):
    for i, statement in enumerate(body):
        if i < 2 or not releases(statement):
            continue
        first = i
        while first and _may_follow(body[first - 1], statement):
            first -= 1
        if first >= i - 1 or not any(touches_memory(s) for s in body[first:i]):
            continue  # otherwise it is a swap
        (start, _), (own_start, own_end) = source.span(body[first]), source.span(statement)
        between = source.text[start:own_start].rstrip()
        if "\n" in source.of(statement):
            continue
        new = (
            f"{source.of(statement)}; {between}"
            if not isinstance(body[first], (ast.If, ast.While))
            else f"{source.of(statement)}\n{' ' * statement.col_offset}{between}"
        )
        if new.count("\n") <= source.text.count("\n", start, own_end):
            what = f"{_words(statement)} before {_words(body[first])}"
            source.add("early", function, (start, own_end), new, what, body[first], statement)


def _may_follow(statement, release):
    """Whether a statement may run after a release that is moved before it."""
    is_constant = isinstance(getattr(statement, "value", None), ast.Constant)
    return not leaves(statement) and independent(statement, release) and not is_constant


def _skips(source, function, statement, names):
    if not stores_constant(statement):
        return
    conditions = [("my_rank & 1 == 0", "on odd ranks")] if "my_rank" in names else []
    conditions.append(("(thread_idx() + block_idx()) & 1 == 0", "by every other thread"))
    for condition, where in conditions:
        new, what = f"if {condition}: {source.of(statement)}", f"{_words(statement)} left out {where}"
        source.add("skip", function, source.span(statement), new, what, statement)


def _from_atomics(function):
    """Names to which the function assigns an atomic's result."""
    return {
        t.id
        for n in ast.walk(function)
        if isinstance(n, ast.Assign) and calls_atomic(n.value)
        for t in n.targets
        if isinstance(t, ast.Name)
    }


def _wrong_numbers(source, function, statement, names, whole, from_atomics):
    for n in ast.walk(statement):
        attribute = getattr(getattr(n, "func", None), "attr", "")
        if attribute in WAITS:
            _off_by_one(source, function, n.args[WAITS[attribute]], statement)
        name = called(n)
        if name.startswith("wait_for") and len(n.args) > 1 and "status" not in ast.unparse(n.args[1]):
            _off_by_one(source, function, n.args[1], statement)
        elif (
            (m := STRONG.match(name))
            and m[1] in ("red_add", "atomic_add")
            and ast.unparse(n.args[1]) in ("i32(1)", "u64(1)", "1")
        ):
            new = source.of(n.args[1]).replace("1)", "2)")
            source.add("twice", function, source.span(n.args[1]), new, f"{_words(n)} by 2", statement)
        if isinstance(n, ast.Compare) and len(n.ops) == 1:
            sides = n.left, n.comparators[0]
            strong = [side for side in sides if used(side) & from_atomics or calls_atomic(side)]
            if len(strong) == 1:
                _off_by_one(source, function, n.comparators[0] if strong[0] is n.left else n.left, statement)
    if synchronises(statement):
        _whose(source, function, statement, names, whole)


def _off_by_one(source, function, node, statement):
    for sign, word in (("+", "more"), ("-", "less")):
        what = f"one {word} than {_words(node)} in {_words(statement)}"
        source.add("off by one", function, source.span(node), f"(({source.of(node)}) {sign} 1)", what, statement)


def _is_offset(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OFFSETS


def _whose(source, function, statement, names, whole):
    places = sorted({(n.value.id, n.attr) for n in ast.walk(whole) if _is_offset(n)})
    for n in ast.walk(statement):
        others = []
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in RANKS:
            others = [name for name in RANKS if name in names and name != n.id][:1]
            others = others or ["call.my_rank"] * ("call" in names)
        elif isinstance(n, ast.Attribute) and n.attr == "my_rank":
            others = [name for name in RANKS if name in names][:1]
        elif _is_offset(n):
            others = [f"{base}.{attr}" for base, attr in places if base == n.value.id and attr != n.attr][:1]
        for other in others:
            what = f"{source.of(n)} -> {other} in {_words(statement)}"
            source.add("whose", function, source.span(n), other, what, statement)
