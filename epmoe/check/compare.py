"""Compares a result with the reference's, and names differences in the specification's terms.

`compare_dispatched(cfg, rank, got, want)` and `compare_combined(cfg, rank, got, want)` take one rank's results,
`compare_dispatched_world` and `compare_combined_world` lists over ranks. Each returns a list of `Difference`, one for
each array that differs; it is empty if the results are equal. Equality is exact, except where the protocol is free:

- rows may be swapped within an (expert, src_rank) segment, together with their src_info and scales;
- the payload of padding rows, scale bytes of unused places, and rows beyond row_offsets[-1] are not compared;
- in combine every NaN equals every NaN, because hardware and NumPy produce different ones.

`want` is the reference's Dispatched, `got` any object (or dict) with its fields. A field that is missing or None in
`got` is not compared, except output_tokens, row_offsets, src_info and, in formats that have them, output_scales, which
are required. Arrays are NumPy arrays or convert with np.asarray. Of arrays with spare capacity the first
row_offsets[-1] rows count.
"""

import numpy as np

from epmoe.check.calls import WrongForm, listed
from epmoe.check.compare_segments import compare_payload, compare_scales, compare_src_info
from epmoe.check.difference import Difference, as_array, bits, columns, form, shown
from epmoe.check.places import layout, places_of, src_rank_at
from epmoe_ref.errors import EPValueError
from epmoe_ref.formats.scale_layout import transposed

NEEDED = ("output_tokens", "row_offsets", "src_info", "output_scales")  # those that the reference's result has
RULE = {
    "recv_count": "recv_count[local expert, src_rank] is the number of (token, k) pairs routed there",
    "row_offsets": "row_offsets are exclusive prefix sums of the experts' row counts (rounded up where the format "
    "pads), one entry more than there are groups",
    "expert_ids": "expert_ids are local ids, 0 .. n_groups - 1",
    "scales_offset": "scales_offset[g] = sum over i < g of ceil(rows of i / 128), minus row_offsets[g] // 128",
    "topk_ids": "dispatch keeps the ids as int32, with bad ones turned into -1",
    "num_tokens": "num_tokens is the number of tokens that the rank put in",
}


def field(result, name):
    """A field of a result that is an object or a dict; None if it is missing."""
    return result.get(name) if isinstance(result, dict) else getattr(result, name, None)


def _names(result):
    """The names of a result's fields."""
    return [n for n in (result if isinstance(result, dict) else getattr(result, "__dict__", ())) if n[:1] != "_"]


def array(result, name):
    """A field of a result as a NumPy array; None if the result does not have it."""
    value = field(result, name)
    return None if value is None else as_array(value)


def compare_dispatched(cfg, rank, got, want):
    """Differences between one rank's dispatch result and the reference's, the most informative first.

    got: an object or a dict with the fields of epmoe_ref.Dispatched as arrays. output_tokens, row_offsets, src_info
    and, in formats that have them, output_scales are required. Other missing fields are not compared, and neither are
    rows past row_offsets[-1]. want: epmoe_ref.dispatch(cfg, ...)[rank]. The order of rows within an (expert, src_rank)
    segment is free. Everything else is compared bit for bit. Returns a list of Difference, empty if they are equal.
    """

    def both(name):
        return array(got, name), array(want, name)

    if not 0 <= rank < cfg.n_ranks:
        raise EPValueError(f"rank={rank} must be at least 0 and less than n_ranks={cfg.n_ranks}")
    needed = [name for name in NEEDED if field(want, name) is not None]
    if missing := [name for name in needed if field(got, name) is None]:
        names = _names(got)
        says = f"has no {', '.join(missing)}; it has {', '.join(names) or f'nothing, it is {got!r:.60}'}"
        if set(missing) <= set(names):
            says = f"has None for {', '.join(missing)}"
        rule = f"{', '.join(needed)} must be given, in a dict or an object"
        return [Difference("dispatch's result", says, got, want, rank, rule=rule)]
    found = [
        d
        for name in ("recv_count", "row_offsets", "expert_ids", "scales_offset", "topk_ids", "num_tokens")
        if (d := _compare_small(cfg, rank, name, *both(name)))
    ]
    if any(d.what in ("recv_count", "row_offsets") for d in found):
        return found  # without common segments no row has a counterpart
    where = places_of(cfg, rank, want)
    names = "src_info", "output_tokens", "output_scales"
    shape = [d for name in names if (d := _compare_row_shape(cfg, rank, name, *both(name)))]
    found += shape
    if any(d.what in ("src_info", "output_tokens") for d in shape):
        return found
    src_got, src_want = (x[: where.n_rows].astype(np.int64) for x in both("src_info"))
    difference, pairs = compare_src_info(cfg, rank, where, src_got, src_want)
    if difference:
        return found + [difference]
    found += compare_payload(cfg, rank, where, pairs, src_want, *both("output_tokens"))
    scales = both("output_scales")
    if not shape and all(of is not None for of in scales):
        found += compare_scales(cfg, rank, where, pairs, src_want, *scales, field(want, "row_offsets"))
    return found


def compare_dispatched_world(cfg, got, want):
    """Differences over all ranks: compare_dispatched of each. got and want are lists over ranks."""
    try:
        got = listed("dispatch", got, len(want), "results")
    except WrongForm as wrong:
        return [wrong.difference]
    return [d for rank in range(len(want)) for d in compare_dispatched(cfg, rank, got[rank], want[rank])]


def _compare_small(cfg, rank, name, got, want):
    if got is None or want is None:
        return None
    if got.shape != want.shape:
        return Difference(name, f"has shape {got.shape}, reference {want.shape}", got, want, rank, rule=RULE[name])
    if got.dtype.kind not in "iu":
        return Difference(name, f"has dtype {got.dtype}; integers are needed", got, want, rank, rule=RULE[name])
    different = got != want  # integers of any width compare exactly; nothing is cast
    if not different.any():
        return None
    at = tuple(int(i) for i in np.argwhere(different)[0]) if different.ndim else ()
    place = {}
    if name == "recv_count":
        place = dict(expert=rank * cfg.n_local_experts + at[0], src_rank=src_rank_at(cfg, rank, at[1]))
    elif name == "topk_ids":
        place = dict(token=at[0], k=at[1])
    index = f"[{', '.join(map(str, at))}]" if at else ""
    whole = f"; whole array {got.tolist()}, reference {want.tolist()}" if 1 < got.size <= 16 else ""
    says = f"{index} is {shown(got[at])}, reference {shown(want[at])}{whole}".lstrip()
    return Difference(name, says, got, want, rank, rule=RULE[name], **place)


def _compare_row_shape(cfg, rank, name, got, want):
    """The Difference in shape or element size of an array that grows with the rows; None if there is none."""
    if got is None or want is None:
        return None
    fits, has_type, more, rule = row_shape_fits(cfg, name, got, want), same_type(got, want), "", ""
    if fits and has_type:
        return None
    if not fits and not (name == "output_scales" and cfg.fuse_a_scale_preshuffle):
        more = f" (axis {_rows_axis(cfg, name)} may be longer)"
    if not has_type:
        rule = (
            f"{name} holds {want.dtype}, or its bits as unsigned integers; values are looked at when the type is right"
        )
    return Difference(name, f"is {form(got)}, reference {form(want)}{more}", got, want, rank, rule=rule)


def _rows_axis(cfg, name):
    return 1 if name == "output_scales" and layout(cfg) is transposed else 0


def row_shape_fits(cfg, name, got, want):
    """Whether an array that grows with the rows has the reference's shape, except for spare rows and tiles."""
    if name == "output_scales" and cfg.fuse_a_scale_preshuffle:
        return got.size == want.size
    axis = _rows_axis(cfg, name)
    return (
        got.ndim == want.ndim
        and got.shape[axis] >= want.shape[axis]
        and got.shape[:axis] + got.shape[axis + 1 :] == want.shape[:axis] + want.shape[axis + 1 :]
    )


def same_type(got, want):
    """Whether an array has the reference's type, or is its bits, so that elements can be compared."""
    is_bits = got.dtype.kind == "u" or got.dtype.type is np.void  # the types of ml_dtypes have kind V, too
    return got.dtype.itemsize == want.dtype.itemsize and (
        is_bits or got.dtype == want.dtype or got.dtype.kind == want.dtype.kind == "i"
    )


def compare_combined(cfg, rank, got, want, *, topk_ids=None, epilogue=False):
    """Differences between one rank's combine output and the reference's.

    got, want: [num_tokens, hidden] or, without router weights, [num_tokens, top_k, hidden], in the output type.
    topk_ids [num_tokens, top_k] names experts in messages. epilogue: there is one, for the rule. Compared bit for bit,
    except that any NaN equals any NaN. Returns a list of Difference, empty if they are equal.
    """
    got, want = as_array(got), as_array(want)
    if got.shape != want.shape or not same_type(got, want):
        return [
            Difference("output", f"is {form(got)}, reference {form(want)}", got, want, rank, rule=_remedy(got, want))
        ]
    got = np.ascontiguousarray(got).view(want.dtype)
    different = (bits(got) != bits(want)) & ~(np.isnan(got) & np.isnan(want))
    if not different.any():
        return []
    at = tuple(int(i) for i in np.argwhere(different)[0])
    place, of_token = dict(token=at[0], column=at[-1]), ""
    if len(at) == 2 and topk_ids is not None:
        of_token = f"; the token's experts are {', '.join(map(str, topk_ids[at[0]].tolist()))}"
    if len(at) == 3:
        place["k"] = at[1]
        if topk_ids is not None and topk_ids[at[0]][at[1]] >= 0:
            place["expert"] = int(topk_ids[at[0]][at[1]])
    n_tokens = int(different.any(axis=tuple(range(1, different.ndim))).sum())
    says = (
        f"is {shown(got[at])}, reference {shown(want[at])}; first of {int(different.sum())} differing elements in "
        f"{n_tokens} of {len(want)} tokens{columns(different)}{of_token}"
    )
    rule = "without router weights out[t, k] is the expert's row, and zero where the id is -1"
    if len(at) < 3:
        rule = "out[t] = sum over k ascending of w[t, k] * y[t, k], fused multiply-add in float32 from +0, rounded once"
        if cfg is not None and cfg.fused_shared_expert:
            rule += "; the shared expert's row is added to that and rounded again"
        if epilogue:
            rule += "; the epilogue gets that, and its result is rounded again"
    return [Difference("output", says, got, want, rank, rule=rule, **place)]


def _remedy(got, want):
    """What makes a result of another type or shape one like the reference's."""
    if same_type(got, want):
        return "combine returns [num_tokens, hidden], or [num_tokens, top_k, hidden] without router weights"
    module = "np" if want.dtype.isbuiltin == 1 else "ml_dtypes"
    return f"the result is {want.dtype}, or its bits as unsigned integers: .astype({module}.{want.dtype})"


def compare_combined_world(cfg, got, want, *, topk_ids=None):
    """Differences over all ranks: compare_combined of each. got, want and topk_ids are lists over ranks."""
    try:
        got = listed("combine", got, len(want), "arrays")
    except WrongForm as wrong:
        return [wrong.difference]
    ids = topk_ids if topk_ids is not None else [None] * len(want)
    return [
        d for rank in range(len(want)) for d in compare_combined(cfg, rank, got[rank], want[rank], topk_ids=ids[rank])
    ]


def report(differences, limit=10):
    """The differences as text, a paragraph each, at most `limit`; "no difference" if there are none."""
    if not differences:
        return "no difference"
    lines = [str(d) for d in differences[:limit]]
    if len(differences) > limit:
        lines.append(f"... and {len(differences) - limit} more")
    return "\n".join(lines)
