"""Checks arguments before anything is launched: host arrays fully, device arrays by shape, dtype and device.

Every message names the rank, the value, the rule and the remedy; for routing also the token and k.
"""

from math import prod

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.host.arrays import VECTOR_BYTES, Array, view
from epmoe_ref.errors import EPValueError

BF16 = np.dtype(ml_dtypes.bfloat16)
COMBINE_DTYPE = {"bf16": BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def ranks_of(world, what, argument):
    """The argument as a list over the ranks of this process; wraps a single rank's argument."""
    if not world.lists:
        return [argument]
    if not isinstance(argument, (list, tuple)):
        raise EPValueError(
            f"{what} must be a list with one entry for each of the {len(world.ranks)} ranks of the LocalWorld, "
            f"not {type(argument).__name__}"
        )
    if len(argument) != len(world.ranks):
        raise EPValueError(f"{what} has {len(argument)} entries; one for each of {len(world.ranks)} ranks is needed")
    return list(argument)


def each_rank(world, **arguments):
    """Iterate over the ranks of this process: a tuple of the rank's arguments, None for those that were left out."""
    none = [None] * len(world.ranks)
    return zip(*[none if a is None else ranks_of(world, what, a) for what, a in arguments.items()])


def tokens(cfg, machine, rank, given):
    """Check input_tokens of a rank: bf16 (num_tokens, hidden), num_tokens <= max_tokens_per_rank.

    If the token format is bf16, fp16 and float32 arrays in host memory are rounded to bf16 here, once.
    """
    what = f"input_tokens of rank {rank}"
    a = readable(machine, given, what)
    if a.host is not None and cfg.token_format == "bf16" and a.dtype in (np.float16, np.float32):
        with np.errstate(all="ignore"):
            a = view(a.host.astype(BF16), what)
    if a.dtype != BF16:
        or_view = ", or view it as bfloat16 if its 16 bits are bf16 already" if a.dtype.itemsize == 2 else ""
        raise EPValueError(f"{what} has dtype {a.dtype}, bfloat16 is needed: convert it{or_view}")
    if a.shape[1:] != (cfg.hidden,):
        raise EPValueError(f"{what} has shape {a.shape}, (num_tokens, hidden={cfg.hidden}) is needed")
    if a.shape[0] > cfg.max_tokens_per_rank:
        raise EPValueError(
            f"{what} holds {a.shape[0]} tokens, more than "
            f"max_tokens_per_rank={cfg.max_tokens_per_rank}: raise it, or use several rounds"
        )
    return a


def topk_ids(cfg, machine, rank, given, num_tokens):
    """Check topk_ids of a rank: integers (num_tokens, top_k); -1, or ids in [0, n_experts) distinct in a token."""
    what = f"topk_ids of rank {rank}"
    a = readable(machine, given, what)
    if a.dtype.kind not in "iu":
        raise EPValueError(f"{what} has dtype {a.dtype}, an integer type is needed: convert it to int64")
    if a.shape != (num_tokens, cfg.top_k):
        needed = f"(num_tokens={num_tokens}, top_k={cfg.top_k}) is needed, one row for each token of input_tokens"
        raise EPValueError(f"{what} has shape {a.shape}, {needed}")
    if a.host is not None:
        check_ids(what, a.host, "n_experts", cfg.n_experts)
    return a


def check_ids(what, ids, name, n_experts):
    """Raise EPValueError unless ids are in [-1, n_experts) and distinct in a token. name: n_experts' in messages."""
    outside = (ids < -1) | (ids >= n_experts)
    if outside.any():
        token, k = (int(i) for i in np.argwhere(outside)[0])
        raise EPValueError(
            f"{what}: token {token}, k {k} holds {int(ids[token, k])}, which is outside "
            f'[0, {name}={n_experts}); -1 is the id for "no expert" (number of such ids: {int(outside.sum())})'
        )
    ordered = np.sort(ids.astype(np.int32), axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token = int(np.argwhere(twice.any(axis=1))[0][0])
        value = int(ordered[token, 1:][twice[token]][0])
        first, k = (int(i) for i in np.argwhere(ids[token] == value)[:2, 0])
        raise EPValueError(
            f"{what}: token {token}, k {k} holds {value}, which k {first} of the token already holds; the ids of one "
            "token must be distinct: put -1 into one of them"
        )


def expert_outputs(cfg, machine, rank, given, capacity, d):
    """Check expert outputs of a rank: combine_dtype (rows, hidden), in the order of output_tokens.

    rows: the exact number or capacity. d: a Dispatched; its n_rows waits, and is read only if rows are not capacity.
    """
    what = f"expert_outputs of rank {rank}"
    a, dtype = readable(machine, given, what), COMBINE_DTYPE[cfg.combine_dtype]
    if a.dtype != dtype:
        rule = f"combine_dtype={cfg.combine_dtype!r} needs {dtype}: convert it, or configure another combine_dtype"
        raise EPValueError(f"{what} has dtype {a.dtype}, {rule}")
    if a.shape[1:] != (cfg.hidden,):
        raise EPValueError(f"{what} has shape {a.shape}, (rows, hidden={cfg.hidden}) is needed")
    return _one_for_each_row(a, what, capacity, d)


def gate_up(machine, rank, given, capacity, d):
    """Check the experts' first product: bf16 (rows, 2 * width); rows and d as in expert_outputs."""
    what = f"gate_up of rank {rank}"
    a = readable(machine, given, what)
    if a.dtype != BF16:
        raise EPValueError(f"{what} has dtype {a.dtype}, bfloat16 is needed: convert it")
    if len(a.shape) != 2 or a.shape[1] % 2 or a.shape[1] == 0:
        raise EPValueError(f"{what} has shape {a.shape}, (rows, 2 * width) is needed: gate and up side by side")
    return _one_for_each_row(a, what, capacity, d)


def _one_for_each_row(a, what, capacity, d):
    if a.shape[0] != capacity and a.shape[0] != d.n_rows:
        raise EPValueError(
            f"{what} has {a.shape[0]} rows; one is needed for each of the {d.n_rows} dispatched rows, "
            f"padding included, or for all {capacity} of the capacity"
        )
    return a


def router_weights(cfg, machine, rank, given, num_tokens):
    """Check router weights of a rank: float32 (num_tokens, top_k)."""
    what = f"router_weights of rank {rank}"
    if callable(given):
        raise EPValueError(f"{what} is a function: give one function for all ranks, not a list of them")
    if not hasattr(given, "shape") and np.ndim(given) == 0:
        raise EPValueError(
            f"{what} is {given!r}; a float32 array (num_tokens={num_tokens}, top_k={cfg.top_k}) or a "
            "function (token, k, *router_weights_args) -> float32 is needed, a single number is refused"
        )
    a = readable(machine, given, what)
    if a.dtype != np.float32:
        raise EPValueError(f"{what} has dtype {a.dtype}, float32 is needed: convert it")
    if a.shape != (num_tokens, cfg.top_k):
        raise EPValueError(f"{what} has shape {a.shape}, (num_tokens={num_tokens}, top_k={cfg.top_k}) is needed")
    return a


def input_scale(rank, given):
    """Check the input scale of a rank: a number that is positive and finite in float32."""
    what = f"input_scale of rank {rank} is {given!r}"
    if isinstance(given, bool) or not isinstance(given, (int, float, np.number)):
        raise EPValueError(f"{what}; a positive finite number is needed, or a function (i) -> float32")
    if not is_scale(given):
        raise EPValueError(f"{what}; it must be positive and finite in float32")
    return np.float32(given)


def is_scale(number):
    """Whether a number is positive and finite in float32."""
    with np.errstate(over="ignore"):
        scale = np.float32(number)
    return bool(np.isfinite(scale) and scale > 0)


def world(what, given):
    """Check that `given` is a world, not a class; returns it."""
    if isinstance(given, type) and hasattr(given, "allocate"):
        raise EPValueError(
            f"{what} is the class {given.__name__}; make a world of it: {given.__name__}({'2' * given.lists})"
        )
    if not hasattr(given, "allocate") or not hasattr(given, "launching"):
        raise EPValueError(
            f"{what} must be a LocalWorld, MPIWorld or ShmemWorld, not {type(given).__name__}; "
            "for a process group of torch, give epmoe.torch.ProcessGroupWorld(group)"
        )
    return given


def result(machine, given, shape, dtype, what):
    """Check an out= array: shape and dtype must be the result's; writable; on a GPU C-contiguous."""
    a = readable(machine, given, what)
    if a.dtype != dtype or a.shape != tuple(shape):
        raise EPValueError(f"{what} is {a.dtype} {a.shape}, the result is {np.dtype(dtype)} {tuple(shape)}")
    if a.host is not None and not a.host.flags.writeable:
        raise EPValueError(f"{what} is read-only, and a result is written into it: give a writable array")
    return a


def readable(machine, given, what, in_vectors=True):
    """Check that this machine's kernels can read an array, and return it as Array.

    in_vectors: rows of whole 16-byte vectors must start at a multiple of 16 bytes.
    """
    a = given if type(given) is Array else view(given, what)
    if a.host is not None:
        return a
    if device.SIM:
        raise EPValueError(
            f"{what} is in GPU memory, and epmoe runs in the simulator here: give host memory (x.cpu(), "
            "x.get()), or see `epmoe doctor` for why the GPU is not used"
        )
    if a.device is not None and a.device != machine.ordinal:
        raise EPValueError(f"{what} is on GPU {a.device}, this rank runs on GPU {machine.ordinal}: move it there")
    if not a.dtype.isnative:
        raise EPValueError(
            f"{what} has dtype {a.dtype.str}, whose bytes are not in this machine's order: convert it, "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    if a.strides is not None:
        raise EPValueError(
            f"{what} is not C-contiguous (strides {a.strides} bytes, shape {a.shape}), and arrays in GPU "
            "memory are read where they lie: x.contiguous() in torch, cupy.ascontiguousarray(x)"
        )
    row_bytes = a.dtype.itemsize * prod(a.shape[-1:])
    if in_vectors and a.address % VECTOR_BYTES and row_bytes % VECTOR_BYTES == 0:
        raise EPValueError(f"{what} starts at 0x{a.address:x}, which is no multiple of {VECTOR_BYTES} bytes: copy it")
    return a
