"""Checks of the arguments of fused_a2a functions. Each error names the value, the rule and the remedy."""

import operator

import ml_dtypes
import numpy as np

from ..errors import EPValueError

BF16 = np.dtype(ml_dtypes.bfloat16)
SIXTEEN_BIT = (BF16, np.dtype(np.float16))
SUMMED = (*SIXTEEN_BIT, np.dtype(np.float32))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ACCESS_BYTES = 16  # a row is moved in accesses of 128 bits
SCALE_GROUP = 128  # elements that share a scale in blockwise FP8


def get_hidden_bytes(x) -> int:
    """Bytes that a buffer needs for one row of x.

    x: [T, H] of one rank. Result: H * max(itemsize, 2). One-byte inputs count as 2 bytes, because combine sends
    bfloat16.
    Errors: x is not a matrix.
    Source: get_hidden_bytes of the fused_a2a page.
    """
    if getattr(x, "ndim", None) != 2:
        shape = getattr(x, "shape", type(x).__name__)
        raise EPValueError(f"x is {shape}: hidden bytes belong to one rank's matrix [tokens, hidden]; pass x[rank]")
    return int(x.shape[1]) * max(x.dtype.itemsize, 2)


def over_ranks(name: str, per_rank, n_ranks: int | None = None) -> list:
    """The argument as a list with one entry a rank."""
    if not isinstance(per_rank, (list, tuple)):
        raise EPValueError(
            f"{name} is a {type(per_rank).__name__}: it must be a list with one entry a rank; "
            f"write [{name}] for a world of one rank"
        )
    if n_ranks is None and not per_rank:
        raise EPValueError(f"{name} is an empty list: a world has at least one rank; pass one array a rank")
    if n_ranks is not None and len(per_rank) != n_ranks:
        raise EPValueError(f"{name} has {len(per_rank)} entries for a world of {n_ranks} ranks; pass one array a rank")
    return list(per_rank)


def absent(per_rank) -> bool:
    """True if an optional argument was left out: it is None, or None on every rank."""
    return per_rank is None or isinstance(per_rank, (list, tuple)) and all(array is None for array in per_rank)


def whole(name: str, value, least: int) -> int:
    """The argument as an int of at least `least`. 0-d integer arrays count as numbers."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise EPValueError(f"{name}={value!r} must be an integer, at least {least}") from None
    if number < least:
        raise EPValueError(f"{name}={number} must be at least {least}; choose a larger {name}")
    return number


def matrices(
    name: str, per_rank, n_ranks: int | None = None, *, dtypes=None, one_dtype=True, n_rows=None, n_columns=None
) -> list[np.ndarray]:
    """The argument as one matrix for each rank, all of one width (and dtype), with the required rows and columns."""
    arrays = [np.asarray(array) for array in over_ranks(name, per_rank, n_ranks)]
    for rank, array in enumerate(arrays):
        if array.ndim != 2:
            raise EPValueError(f"{name}[{rank}] has shape {array.shape}: it must be a matrix with one row a token")
        if dtypes is not None and array.dtype not in dtypes:
            names = " or ".join(dtype.name for dtype in dtypes)
            raise EPValueError(f"{name}[{rank}] has dtype {array.dtype}: it must be {names}; convert it first")
        if one_dtype and array.dtype != arrays[0].dtype:
            raise EPValueError(
                f"{name}[{rank}] has dtype {array.dtype}, {name}[0] has {arrays[0].dtype}: "
                "all ranks must use one dtype; convert one of them"
            )
        if array.shape[1] != arrays[0].shape[1]:
            raise EPValueError(
                f"{name}[{rank}] has {array.shape[1]} columns, {name}[0] has {arrays[0].shape[1]}: "
                f"all ranks must have the same number; give {name} one width"
            )
        if n_rows is not None and array.shape[0] != n_rows[rank]:
            raise EPValueError(
                f"{name}[{rank}] has {array.shape[0]} rows where {n_rows[rank]} belong; "
                "pass the arrays and the handle of one and the same dispatch"
            )
        if n_columns is not None and array.shape[1] != n_columns:
            raise EPValueError(f"{name}[{rank}] has {array.shape[1]} columns where {n_columns} belong; check its shape")
    return arrays


def hidden_rows(name: str, per_rank, n_ranks: int | None = None, *, dtypes=None, n_rows=None) -> list[np.ndarray]:
    """The argument as hidden states, one matrix [rows, H] a rank, whose rows are a multiple of 16 bytes."""
    arrays = matrices(name, per_rank, n_ranks, dtypes=dtypes, n_rows=n_rows)
    width, dtype = arrays[0].shape[1], arrays[0].dtype
    if dtype.hasobject:
        raise EPValueError(f"{name}[0] has dtype {dtype}: rows are moved as bytes; pass a dtype without references")
    if width < 1 or width * dtype.itemsize % ACCESS_BYTES:
        raise EPValueError(
            f"rows of {name} have {width} x {dtype.itemsize} = {width * dtype.itemsize} bytes: they must be a "
            f"multiple of {ACCESS_BYTES} bytes, and not empty; pad the hidden size"
        )
    return arrays


def scaled_rows(name: str, per_rank) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The argument as blockwise FP8, split into a pair (e4m3 [T, H], float32 scales [T, H / 128]) for each rank."""
    pairs = over_ranks(name, per_rank)
    for rank, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise EPValueError(
                f"{name}[{rank}] is not a pair (tokens, scales), {name}[0] is; use one form on all ranks"
            )
    tokens = hidden_rows(f"{name} (tokens)", [pair[0] for pair in pairs], dtypes=(E4M3,))
    hidden = tokens[0].shape[1]
    if hidden % SCALE_GROUP:
        raise EPValueError(
            f"hidden={hidden} of {name} must be a multiple of {SCALE_GROUP} for FP8; pad the hidden size"
        )
    scales = matrices(
        f"{name} (scales)",
        [pair[1] for pair in pairs],
        dtypes=(np.dtype(np.float32),),
        n_rows=[len(array) for array in tokens],
        n_columns=hidden // SCALE_GROUP,
    )
    return tokens, scales


def expert_indices(name: str, per_rank, n_rows: list[int], num_experts: int) -> list[np.ndarray]:
    """The argument as int64 [T, K] of distinct global expert ids, -1 for no expert."""
    arrays = matrices(name, per_rank, len(n_rows), one_dtype=False, n_rows=n_rows)
    for rank, array in enumerate(arrays):
        if array.dtype.kind not in "iu":
            raise EPValueError(f"{name}[{rank}] has dtype {array.dtype}: expert ids are integers; convert it to int64")
        top_k = array.shape[1]
        if not 1 <= top_k <= num_experts:
            raise EPValueError(
                f"{name}[{rank}] has {top_k} ids a token: there must be 1 to num_experts={num_experts}; "
                "drop the columns that cannot hold an expert"
            )
        wild = (array >= num_experts) | ((array < -1) if array.dtype.kind == "i" else False)
        if wild.any():
            token, k = np.argwhere(wild)[0]
            raise EPValueError(
                f"{name}[{rank}][{token}, {k}] = {array[token, k]}: an id must be in [0, {num_experts}), "
                "or -1 for no expert"
            )
        ids = np.sort(array.astype(np.int64), axis=1)
        twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        if twice.any():
            token, place = np.argwhere(twice)[0]
            raise EPValueError(
                f"{name}[{rank}][{token}] = {array[token].tolist()} has expert {ids[token, place]} twice: "
                "the ids of a token must be distinct; put -1 for one of them"
            )
    return [array.astype(np.int64) for array in arrays]


def experts_per_rank(num_experts, n_ranks: int) -> int:
    """L, the number of experts a rank has."""
    num_experts = whole("num_experts", num_experts, 1)
    if num_experts % n_ranks:
        raise EPValueError(f"num_experts={num_experts} must be a multiple of n_ranks={n_ranks}; add experts or ranks")
    return num_experts // n_ranks


def handle_of(kind: type, handle):
    """The handle. EPValueError unless the matching dispatch made it."""
    if not isinstance(handle, kind):
        raise EPValueError(
            f"handle is a {type(handle).__name__}: it must be the {kind.__name__} that the matching dispatch_forward "
            "returned; pass that one"
        )
    return handle


def row_probs(name: str, per_rank, n_rows: list[int]) -> list[np.ndarray]:
    """The argument as one float32 vector [P] a rank."""
    arrays = [np.asarray(array) for array in over_ranks(name, per_rank, len(n_rows))]
    for rank, array in enumerate(arrays):
        if array.dtype != np.float32:
            raise EPValueError(f"{name}[{rank}] has dtype {array.dtype}: it must be float32; convert it first")
        if array.shape != (n_rows[rank],):
            raise EPValueError(
                f"{name}[{rank}] has shape {array.shape} where ({n_rows[rank]},) belongs; "
                "pass the arrays and the handle of one and the same dispatch"
            )
    return arrays


def p2p_world(p2p_world_size, n_ranks: int) -> int:
    """Ranks in a p2p world. None means all of them."""
    if p2p_world_size is None:
        return n_ranks
    size = whole("p2p_world_size", p2p_world_size, 1)
    if n_ranks % size:
        raise EPValueError(f"p2p_world_size={size} must divide n_ranks={n_ranks}; all p2p worlds have one size")
    return size


def same_num_rows(num_permuted_tokens, num_rows: list[int]) -> None:
    """Check that num_permuted_tokens (one number, or one for each rank) equals the handle's."""
    if not isinstance(num_permuted_tokens, (list, tuple)):
        num_permuted_tokens = [num_permuted_tokens] * len(num_rows)
    numbers = over_ranks("num_permuted_tokens", num_permuted_tokens, len(num_rows))
    for rank, number in enumerate(numbers):
        if whole("num_permuted_tokens", number, 0) != num_rows[rank]:
            raise EPValueError(
                f"num_permuted_tokens={number}, but the dispatch of this handle made {num_rows[rank]} rows on rank "
                f"{rank}: they must be the same; leave it out"
            )
