"""Which Buffer belongs to which group: one for FusedDispatch and FusedCombine, one for HybridEP; and what calls return."""

import weakref

from epmoe.fused_a2a import arguments
from epmoe.fused_a2a.buffer import Buffer
from epmoe.fused_a2a.expanding import staged_bytes
from epmoe.host import inputs
from epmoe_ref.errors import EPValueError


class _Buffers(weakref.WeakKeyDictionary):
    """group -> Buffer. latest: references to the group and the Buffer that were found last, to find them sooner."""

    latest = 2 * (lambda: None,)

    def find(self, group):
        """The open Buffer of a group, or None."""
        try:
            buffer = self.get(group)
        except TypeError:  # no key of a WeakKeyDictionary
            return None
        if buffer is None or buffer.closed:
            return None
        self.latest = weakref.ref(group), weakref.ref(buffer)
        return buffer

    def let_go(self):
        """Nothing was found last."""
        self.latest = type(self).latest

    def __setitem__(self, group, buffer):
        self.let_go()
        super().__setitem__(group, buffer)

    def pop(self, group, *otherwise):
        self.let_go()
        return super().pop(group, *otherwise)


_buffer = _Buffers()
_hybrid_ep_buffer = _Buffers()
options = {"num_sms": None}  # how many SMs FusedDispatch and FusedCombine may take


def _made(buffers, group):
    """A new Buffer for a group; it lives as long as the group does."""
    _expect_world(group)
    size = group.n_ranks
    if getattr(group, "shmem", False) and not group.lists:
        size = getattr(group, "p2p_world_size", size)
    if size < group.n_ranks:
        raise EPValueError(
            f"group has p2p_world_size={size} and {group.n_ranks} ranks: fused_a2a writes the memory of "
            "all ranks directly, so they must be one p2p world; use an MPIWorld, or "
            f"ShmemWorld(p2p_world_size={group.n_ranks})"
        )
    patience = {"timeout": group.timeout} if hasattr(group, "timeout") else {}
    buffer = buffers[group] = Buffer(weakref.proxy(group), **patience)
    if group.lists:
        weakref.finalize(group, buffer.close, collective=False).atexit = False
    return buffer


def _expect_world(group):
    """Nothing, if group is a world."""
    if isinstance(group, type) or hasattr(group, "allocate"):
        inputs.world("group", group)
    else:
        raise EPValueError(
            f"group is a {type(group).__name__}; a world of epmoe is needed (LocalWorld, MPIWorld, "
            "ShmemWorld); epmoe.torch also takes process groups of torch.distributed"
        )


def _finder(buffers, doc):
    """Function (group): its Buffer, made if there is none; a function that both called would cost each call more."""

    def buffer_of(group):
        of, latest = buffers.latest
        if of() is group:
            buffer = latest()
            if buffer is not None and not buffer.closed:
                return buffer
        return buffers.find(group) or _made(buffers, group)

    buffer_of.__doc__ = doc
    return buffer_of


buffer_of = _finder(
    _buffer, "The Buffer of a group for FusedDispatch and FusedCombine, made if there is none."
)
hybrid_ep_buffer = _finder(
    _hybrid_ep_buffer, "The HybridEP buffer of a group, made if there is none."
)


def get_buffer(group, hidden_bytes: int):
    """The Buffer of a group; the same object as long as the group lives, unless it was closed.

    hidden_bytes: of a row, as get_hidden_bytes tells. One buffer a group is kept, so that groups may take turns. Its
    memory grows when rows come that need more: on all ranks in the same call.
    """
    hidden_bytes = arguments.whole("hidden_bytes", hidden_bytes, 0)
    buffer = buffer_of(group)
    buffer.hidden_bytes = max(buffer.hidden_bytes, hidden_bytes)
    return buffer


def set_deepep_num_sms(num_sms):
    """How many SMs FusedDispatch and FusedCombine may take, from now on; None: all. Results do not depend on it."""
    options["num_sms"] = arguments.granted("num_sms", num_sms)


def init_hybrid_ep_buffer(
    group,
    hidden_dim,
    seq_len,
    num_local_experts,
    num_sms_dispatch_api,
    num_sms_combine_api,
    fp8_dispatch,
) -> None:
    """Make the group's HybridEP buffer, for at most seq_len tokens a rank; collective. An earlier one is replaced.

    hidden_dim: elements of a row. fp8_dispatch: HybridEPDispatch then sends blockwise FP8 (bfloat16 in, hidden_dim a
    multiple of 128) and returns e4m3 values and their scales, which upstream refuses. A larger batch or hidden size
    later makes it grow, on all ranks in the same call; handles stay good.
    """
    hidden, tokens = (
        arguments.rows("hidden_dim", hidden_dim, 1),
        arguments.rows("seq_len", seq_len, 1),
    )
    arguments.granted("num_sms_dispatch_api", num_sms_dispatch_api)
    arguments.granted("num_sms_combine_api", num_sms_combine_api)
    if getattr(fp8_dispatch, "shape", ()) or fp8_dispatch not in (True, False, None):
        raise EPValueError(f"fp8_dispatch={fp8_dispatch!r} must be True or False")
    _expect_world(group)
    local = arguments.local_experts(num_local_experts, group.n_ranks)
    arguments.rows("seq_len times n_ranks", tokens * group.n_ranks)
    if _hybrid_ep_buffer.find(group) is not None:
        reset_hybrid_ep_buffer(group)
    buffer = _made(_hybrid_ep_buffer, group)
    buffer.fp8_dispatch = bool(fp8_dispatch)
    facts = dict(
        call="init_hybrid_ep_buffer",
        hidden_dim=hidden,
        seq_len=tokens,
        num_local_experts=local,
        fp8_dispatch=bool(fp8_dispatch),
    )
    rows = group.n_ranks * tokens

    def make():
        buffer.want_experts(local, facts)
        buffer.want_tokens(tokens)
        buffer.want_pool(facts, staging_bytes=staged_bytes(rows, 2 * hidden, local), flag_rows=rows)

    buffer.call("init_hybrid_ep_buffer", make)


def reset_hybrid_ep_buffer(group=None) -> None:
    """Give the HybridEP buffer of a group (None: of all) back; collective. Later calls make one; handles stay good."""
    if group is not None:
        _expect_world(group)
    for key in [group] if group is not None else list(_hybrid_ep_buffer):
        buffer = _hybrid_ep_buffer.pop(key, None)
        if buffer is not None:
            buffer.close()


class Context:
    """What forward leaves for backward, where torch.autograd does not give its own: any object with attributes will do."""


def columns(group, per_rank):
    """What a function returns where each rank has several results: of each a list over ranks, or this rank's own.

    None instead of a list of what no rank has.
    """
    if not group.lists:
        return per_rank[0]
    return [
        None if all(one is None for one in column) else list(column) for column in zip(*per_rank)
    ]
