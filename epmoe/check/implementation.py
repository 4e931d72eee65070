"""The interface for checking your own dispatch and combine: a class with two functions (epmoe.check has an example)."""

import difflib
import sys
from importlib import import_module
from inspect import signature

from epmoe.check.frames import where
from epmoe_ref.config import TOKEN_FORMATS
from epmoe_ref.errors import EPError, EPValueError

COMBINE_DTYPES = ("bf16", "fp16", "fp32")
ROW_DTYPES = (*COMBINE_DTYPES, "fp8")

OPTIONS = frozenset(
    {"unweighted", "epilogue", "input_scale", "fused_shared_expert", "skip_a2a", "use_shmem", "fuse_a_scale_preshuffle"}
)

HALVES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")


class Implementation:
    """Expert-grouped dispatch and combine, one row for each pair (token, k), as the reference defines them.

    Class attributes declare what it supports. Cases that need more are listed as not served:
    token_formats, combine_dtypes: names as in EPConfig. options: of OPTIONS. "unweighted" is combine without router
    weights; each other option adds its keyword arguments to the calls below.
    hidden: the only supported hidden size, a multiple of 256; None: any. max_top_k: the largest top_k; None: any.
    per_rank: False: all ranks in one process; every argument and result is a list over ranks. True: one rank a process
    (under mpirun or torchrun); arguments and results are this rank's.

    With buffers() or counters() every word of its memory is also compared with the model epmoe_ref.protocol. Instead of
    dispatch and combine it may have the four halves dispatch_async(input_tokens, topk_ids, **options), dispatch_wait()
    -> dispatch's result, combine_async(expert_outputs, dispatched), combine_wait(router_weights, **options) ->
    combine's result; if it has both, the halves are called. Words are then compared after each half. No half may return
    before all ranks of this process have done their work.
    """

    token_formats = ("bf16",)
    combine_dtypes = ("bf16",)
    options = frozenset()
    per_rank = False
    hidden = None
    max_top_k = None

    @classmethod
    def make(cls, cfg):
        """One object for one world. cfg is an epmoe_ref.EPConfig. All rounds use the same object."""
        return cls(cfg)

    def __init__(self, cfg):
        self.cfg = cfg

    def dispatch(self, input_tokens, topk_ids, **options):
        """input_tokens bf16 [T, hidden], topk_ids int32 [T, top_k] with -1 for no expert; options: input_scale.

        Returns a dict or an object with output_tokens [rows, hidden] bf16 (other formats: their row),
        row_offsets [n_groups + 1] integers, src_info [rows, 2] int32 (token on src_rank, k), and, if it has them,
        expert_ids [n_groups], recv_count [n_local_experts, n_ranks], output_scales, scales_offset. bf16 is
        ml_dtypes.bfloat16. Rows are grouped by local expert, then by src_rank; their order within a segment is free.
        epmoe_ref.Dispatched describes each array.
        """
        raise NotImplementedError

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        """expert_outputs [rows, hidden] in combine_dtype, in the order of dispatch's rows; dispatched: dispatch's
        result; router_weights float32 [T, top_k] or None; options: epilogue and epilogue_args.
        epilogue(token, col, value, *args) -> what to return for out[token, col], rounded once more; numbers, or arrays
        that broadcast. token and col are int32, value is float32: the sum, with the shared expert's row added, already
        rounded to combine_dtype. epilogue_args: a tuple; each list in it has one entry for each rank, and args are the
        entries of the rank. With per_rank it has these entries in place of the lists.

        Returns [T, hidden], or [T, top_k, hidden] without router weights, in combine_dtype.
        """
        raise NotImplementedError

    dispatch_async = dispatch_wait = combine_async = combine_wait = None

    buffers = None
    """Optional: a method () -> {name: array} that reads memory: any of "dispatch_recv_buf", "dispatch_recv_count",
    "combine_recv_buf", "combine_recv_count", in the shapes of epmoe_ref.protocol.RankState."""

    counters = None
    """Optional: a method () -> int32 [8 * n_experts + 12] that reads counters, in the layout of EPLocalSyncCounters.

    Both return lists over ranks without per_rank. They are also called before the first round and may then return None."""

    def close(self):
        """Called after the last round of a case."""


class _OfMegatron:
    """What both layouts of rows have in common."""

    per_rank = False

    @classmethod
    def make(cls):
        """One object for one world. All rounds use the same object."""
        return cls()

    dispatch_backward = combine_backward = None

    def close(self):
        """Called after the last round of a case."""


class RowsImplementation(_OfMegatron):
    """Megatron's fused_a2a (DeepEP V1): one row for each (token, dst_rank), in order of src_rank and token.

    dtypes: the types of x that it serves: "bf16", "fp16", "fp32", and "fp8" for a pair (e4m3 [T, H], float32 scales [T,
    H / 128]). Other cases are listed as not served. Arguments, and each result but the handle, are lists over ranks, or
    this rank's with per_rank. An object serves one world, of any batch sizes.

    Optional, for gradients: dispatch_backward(grad_recv_x, grad_recv_token_probs, handle) -> (grad_x,
    grad_token_probs), and combine_backward(grad_combined_x, handle) -> the gradient of combine's x.
    """

    dtypes = ROW_DTYPES

    def dispatch(self, x, token_indices, token_probs, num_experts):
        """Returns (recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle).

        x: [T, H], or a pair; see dtypes. token_indices: integers [T, K], -1 for no expert. token_probs: float32 [T, K].
        epmoe_ref.fused_a2a's dispatch_forward defines the results; the handle is the implementation's own.
        """
        raise NotImplementedError

    def combine(self, x, handle):
        """Returns combined_x [T, H], of x's dtype: the sum of each token's rows, x [N, H] in dispatch's order."""
        raise NotImplementedError


class HybridImplementation(_OfMegatron):
    """Megatron's HybridEP: one row for each (token, local expert), grouped by expert, padded or cut to a given size.

    options: the keyword arguments of dispatch that it serves, and "without_probs" for probs=None. Cases that need more
    are listed as not served. dtypes: the types of x that it serves: "bf16", "fp16". Arguments, and each result but the handle, are lists over ranks, or this rank's with
    per_rank.
    Optional, for gradients: dispatch_backward(grad_hidden, grad_probs, handle) -> (grad_x, grad_probs), and
    combine_backward(grad_combined_x, handle) -> the gradient of combine's x.
    """

    options = frozenset({"num_permuted_tokens", "pad_multiple", "fp8_dispatch", "p2p_world_size", "without_probs"})
    dtypes = ("bf16", "fp16")

    def dispatch(self, x, routing_map, probs, num_local_experts, **options):
        """Returns (dispatched_hidden, dispatched_probs, dispatched_scaling_factor, tokens_per_expert, handle).

        x: bf16 or fp16 [T, H]. routing_map: bool [T, E]. probs: float32 [T, E] or None. options: those it serves of
        num_permuted_tokens, pad_multiple, fp8_dispatch, p2p_world_size. epmoe_ref.fused_a2a's hybrid_dispatch_forward
        defines the results. Only the probs of routed pairs may be read. handle.overflow is compared, if there is
        such an attribute.
        """
        raise NotImplementedError

    def combine(self, x, handle):
        """Returns combined_x [T, H], of x's dtype. Rows of x [P, H] without a token must not be read."""
        raise NotImplementedError


def parts_of(name):
    """(module, class) that `module:Class` or the short name of an adapter of epmoe.check.adapters names."""
    from epmoe.check.adapters import ADAPTERS

    module, _, attribute = ADAPTERS.get(name, name).partition(":")
    if not (all(part.isidentifier() for part in module.split(".")) and attribute.isidentifier()):
        near = difflib.get_close_matches(name, ADAPTERS, 1)
        raise EPValueError(
            f"{name!r} must be module:Class (a module's name, no path), or one of {', '.join(ADAPTERS)}"
            + "".join(f"; did you mean {n}?" for n in near)
        )
    return module, attribute


def load(name):
    """The implementation that a name names (see parts_of)."""
    module, attribute = parts_of(name)
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if module != error.name and not module.startswith(f"{error.name}."):
            raise EPValueError(f"{module} needs a module {error.name!r}, which is not installed") from None
        remedy = (
            f"write {module[:-3]}:{attribute}"
            if module.endswith(".py")
            else "run in the folder where it lies, or install it"
        )
        raise EPValueError(f"no module {module!r}: {remedy}") from None
    except EPError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], attribute):
            raise EPValueError(
                f"module {module!r} has no {attribute!r}; its classes: "
                + (", ".join(_classes_of(sys.modules[module])) or "none")
            ) from None
        raise EPValueError(f"importing {module} raised {type(error).__name__}: {error}{where(error)}") from error
    return whole(found, name)


def _classes_of(module):
    """The names of a module's implementations, or of its other classes if it has none."""
    own = [
        (name, found)
        for name, found in vars(module).items()
        if isinstance(found, type) and found.__module__ == module.__name__
    ]
    layouts = Implementation, RowsImplementation, HybridImplementation
    return [name for name, found in own if issubclass(found, layouts)] or [name for name, _ in own]


def whole(found, name):
    """The class, after checking that it has all methods that a check calls. name: its name in messages."""
    layouts = Implementation, RowsImplementation, HybridImplementation
    if not (isinstance(found, type) and issubclass(found, layouts)):
        raise EPValueError(
            f"{name} must be a class derived from epmoe.check.Implementation, RowsImplementation or "
            "HybridImplementation"
        )
    halves = has_halves(found)
    _refuse_unknown_names(found, name)
    _refuse_sizes(found, name)
    for layout in layouts:
        for call in ("dispatch", "combine"):
            own = getattr(found, call)
            if issubclass(found, layout) and not halves and (own is getattr(layout, call) or not callable(own)):
                raise EPValueError(
                    f"{name} has no method {call}{signature(getattr(layout, call))}: what it is given "
                    f"and returns, help(epmoe.check.{layout.__name__}.{call}) says"
                )
    return found


def has_halves(found):
    """Whether an implementation (or its class) has the four halves of dispatch and combine. Some alone are refused."""
    halves = [half for half in HALVES if getattr(found, half, None) is not None]
    if halves and len(halves) < len(HALVES):
        name = found.__name__ if isinstance(found, type) else type(found).__name__
        raise EPValueError(f"{name} has {', '.join(halves)}; all four of {', '.join(HALVES)} are needed, or none")
    return bool(halves)


def _refuse_unknown_names(found, name):
    """Refuse misspelt formats and options. They would silently make cases not served."""
    known = {}
    if issubclass(found, Implementation):
        known = {"token_formats": TOKEN_FORMATS, "combine_dtypes": COMBINE_DTYPES, "options": OPTIONS}
    elif issubclass(found, HybridImplementation):
        known = {"options": HybridImplementation.options, "dtypes": HybridImplementation.dtypes}
    else:
        known = {"dtypes": ROW_DTYPES}
    for attribute, there in known.items():
        given = getattr(found, attribute)
        if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
            raise EPValueError(f"{name}.{attribute} = {given!r} must be a tuple or set of names: {_choice(there)}")
        for one in given:
            if one not in there:
                near = difflib.get_close_matches(str(one), there, 1)
                raise EPValueError(
                    f"{name}.{attribute} has {one!r}"
                    + (f"; did you mean {near[0]!r}?" if near else f"; there are {_choice(there)}")
                )


def _refuse_sizes(found, name):
    """Refuse a hidden that not all token formats can have, and a max_top_k that no case has."""
    most = getattr(found, "max_top_k", None)
    if most is not None and not (isinstance(most, int) and most > 0):
        raise EPValueError(f"{name}.max_top_k = {most!r} must be at least 1, or None for any top_k")
    hidden = getattr(found, "hidden", None)
    if hidden is not None and not (isinstance(hidden, int) and hidden > 0 and hidden % 256 == 0):
        raise EPValueError(f"{name}.hidden = {hidden!r} must be a multiple of 256, or None for any hidden size")


def _choice(names):
    return ", ".join(sorted(names))


def not_served(implementation, case):
    """Why this implementation does not serve a case, in a few words; None if it does."""
    if not issubclass(implementation, Implementation) and case.dtype not in implementation.dtypes:
        return f"x in {case.dtype}"
    if issubclass(implementation, RowsImplementation):
        return None
    if issubclass(implementation, Implementation):
        cfg = case.cfg
        if cfg.token_format not in implementation.token_formats:
            return f"token_format {cfg.token_format}"
        if cfg.combine_dtype not in implementation.combine_dtypes:
            return f"combine_dtype {cfg.combine_dtype}"
        if implementation.max_top_k is not None and cfg.top_k > implementation.max_top_k:
            return f"top_k {cfg.top_k}, more than {implementation.max_top_k}"
    lacking = sorted(case.needs() - set(implementation.options))
    return ", ".join(lacking) or None
