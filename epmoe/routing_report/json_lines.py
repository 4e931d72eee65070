"""Reads expert ids from JSON: one value, or one a line: a token's ids, a step's tokens, or an object with them."""

import json

import numpy as np

from epmoe_ref.config import MAX_EXPERTS
from epmoe_ref.errors import EPValueError

WANTED = (
    "give topk_ids as integers (tokens, top_k), or (steps, tokens, top_k): an .npz or .npy file, "
    'or JSON lines such as [3, 17] (a token), [[3, 17], [5, 0]] (a step) or {"step": 0, "topk_ids": [[3, 17]]}'
)


def read(path, text):
    """(steps, n_experts or None, notes) of a file's text. steps: int64 arrays (tokens, top_k), padded with -1."""
    found = [(place, *_opened(place, value)) for place, value in _values(path, text)]
    depth = max((_depth(ids) for _, ids, _, _ in found), default=0)
    steps, n_experts, widths = {}, None, set()
    for place, value, step, experts in found:
        n_experts = n_experts if experts is None else experts
        if _depth(value) not in (0, depth) or depth > 2:
            raise EPValueError(f"{place} must hold the ids of a token or the tokens of a step, all alike: {WANTED}")
        tokens = [value] if depth < 2 else value
        for ids in tokens:
            if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**31 for i in ids):
                raise EPValueError(f"{place} has {ids!r} where the ids of a token are needed: {WANTED}")
            widths.add(len(ids))
        # a token's line belongs to the step it names; a step's line without a name is a step of its own
        name = ("", place) if depth == 2 and step is None else ("step", json.dumps(step))
        steps.setdefault(name, []).extend(tokens)
    top_k = max(widths, default=0)
    if top_k == 0:
        raise EPValueError(f"{path} names no expert: {WANTED}")
    notes = [f"tokens with fewer than {top_k} ids are filled up with -1 (no expert)"] if len(widths) > 1 else []
    filled = ([ids + [-1] * (top_k - len(ids)) for ids in tokens] for tokens in steps.values())
    return [np.array(tokens, np.int64).reshape(-1, top_k) for tokens in filled], n_experts, notes


def _opened(place, value):
    """(ids, step or None, n_experts or None) of a value."""
    if not isinstance(value, dict):
        return value, None, None
    if "topk_ids" not in value:
        raise EPValueError(f"{place} has no topk_ids (it has {', '.join(value) or 'nothing'}): {WANTED}")
    experts = one_number(place, "n_experts", value["n_experts"]) if "n_experts" in value else None
    return value["topk_ids"], value.get("step"), experts


def one_number(place, name, value):
    """A number of experts as int. Anything else is refused."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu" or not 1 <= array.ravel()[0] <= MAX_EXPERTS:
        raise EPValueError(f"{name} in {place} is {value!r}: one whole number from 1 to {MAX_EXPERTS} is needed")
    return int(array.ravel()[0])


def _values(path, text):
    """(place, value) of the whole text, of each step of a value three deep, or of each line."""
    try:
        value = _parsed(text)
    except ValueError:
        for n, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path}, line {n}", _parsed(line)
                except ValueError as error:
                    raise EPValueError(f"{path}, line {n} is not JSON ({error}): {WANTED}") from None
        return
    if isinstance(value, dict) and _depth(value.get("topk_ids")) == 3:
        yield from ((f"{path}, step {n}", value | {"topk_ids": step}) for n, step in enumerate(value["topk_ids"]))
    elif _depth(value) == 3:
        yield from ((f"{path}, step {n}", step) for n, step in enumerate(value))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield from ((f"{path}, entry {n}", item) for n, item in enumerate(value))
    else:
        yield path, value


def _parsed(text):
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def _depth(value):
    """How deep a list of lists is: 1 a token, 2 a step, 3 steps; 0 if it is empty, 9 if it is no list."""
    if not isinstance(value, list):
        return 9
    below = [_depth(item) for item in value if isinstance(item, list)]
    return 1 + max(below) if below else min(len(value), 1)
