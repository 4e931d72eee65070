"""Keeps two Buffers for each group: one for FusedDispatch and FusedCombine, one for HybridEP."""

from contextlib import suppress
from weakref import WeakKeyDictionary, finalize, proxy, ref

import numpy as np

from epmoe.fused_a2a import arguments, hybrid
from epmoe.fused_a2a.arguments import FP8_GROUP
from epmoe.fused_a2a.buffer import Buffer
from epmoe.fused_a2a.rows import RowsHandle
from epmoe.host import inputs
from epmoe.host.arrays import VECTOR_BYTES
from epmoe.kernels.rows.shape import MAX_RANKS
from epmoe_ref.errors import EPStateError, EPValueError


class _Buffers(WeakKeyDictionary):
    """group -> Buffer, which lives as long as the group does. remedy: what to call after an error."""

    remedy = "get_buffer(group, 0).reset()"

    def of(self, group):
        """The Buffer of a group, made if there is none."""
        try:
            buffer = self.data.get(ref(group))  # faster than get(group)
        except TypeError:  # not a world
            buffer = None
        return self.make(group) if buffer is None or buffer.closed else buffer

    def make(self, group):
        """A new Buffer of a group."""
        inputs.world("group", group)
        if group.n_ranks > MAX_RANKS:
            raise EPValueError(
                f"n_ranks={group.n_ranks}: the rows kernels serve at most {MAX_RANKS}, one a lane of a warp"
            )
        size = getattr(group, "p2p_world_size", group.n_ranks)
        if getattr(group, "shmem", False) and not group.lists and size < group.n_ranks:
            raise EPValueError(
                f"group has p2p_world_size={size} and {group.n_ranks} ranks: fused_a2a writes the memory of "
                "all ranks directly, so they must be one p2p world; use an MPIWorld, or "
                f"ShmemWorld(p2p_world_size={group.n_ranks})"
            )
        patience = {"timeout": group.timeout} if hasattr(group, "timeout") else {}
        buffer = self[group] = Buffer(proxy(group), **patience)
        buffer.remedy = self.remedy
        if group.lists:
            finalize(group, buffer.close, collective=False).atexit = False
        return buffer


_buffer, _hybrid_ep_buffer = _Buffers(), _Buffers()
_hybrid_ep_buffer.remedy = "reset_hybrid_ep_buffer(group)"
# a handle asks for a Buffer when the dispatch's was closed
RowsHandle.buffer_of = buffer_of = _buffer.of
hybrid.HybridHandle.buffer_of = hybrid_ep_buffer = _hybrid_ep_buffer.of


def get_buffer(group, hidden_bytes: int):
    """The Buffer of a group; the same object as long as the group lives, unless it was closed.

    hidden_bytes: bytes of a row (get_hidden_bytes). Each group has its own buffer, so groups may take turns. Its
    memory grows when a call needs more, on all ranks in the same call.
    """
    arguments.whole("hidden_bytes", hidden_bytes, 0)
    return buffer_of(group)


def set_deepep_num_sms(num_sms):
    """Set how many SMs FusedDispatch and FusedCombine may use from now on; None: all. Results do not depend on it."""
    RowsHandle.num_sms = (arguments.plain("num_sms", num_sms, 1),) * 2


def init_hybrid_ep_buffer(
    group,
    hidden_dim,
    seq_len,
    num_local_experts,
    num_sms_dispatch_api=None,
    num_sms_combine_api=None,
    fp8_dispatch=False,
    *,
    num_blocks_permute=None,
    num_blocks_unpermute=None,
    num_sms_preprocessing_api=None,
) -> None:
    """Make the group's HybridEP buffer, for at most seq_len tokens a rank; collective. An earlier one is replaced.

    hidden_dim: elements of a row. fp8_dispatch: HybridEPDispatch then sends blockwise FP8 (bfloat16 in, hidden_dim a
    multiple of 128) and returns e4m3 values and their scales, which upstream refuses. A larger batch or hidden size
    later makes the buffer grow, on all ranks in the same call; handles stay valid. Keyword-only: as hybrid_ep_dispatch.
    """
    hidden = arguments.rows("hidden_dim", hidden_dim, 1)
    tokens = arguments.rows("seq_len", seq_len, 1)
    arguments.plain("num_sms_dispatch_api", num_sms_dispatch_api, 1)
    arguments.plain("num_sms_combine_api", num_sms_combine_api, 1)
    if not isinstance(fp8_dispatch, (bool, np.bool_, type(None))):  # another release's argument may stand in its place
        raise EPValueError(f"fp8_dispatch={fp8_dispatch!r} must be True or False")
    if 2 * hidden % VECTOR_BYTES or fp8_dispatch and hidden % FP8_GROUP:
        least = FP8_GROUP if fp8_dispatch else VECTOR_BYTES // 2
        raise EPValueError(f"hidden_dim={hidden} must be a multiple of {least} with fp8_dispatch={fp8_dispatch}")
    inputs.world("group", group)
    local = arguments.local_experts(num_local_experts, group.n_ranks)
    rows = arguments.rows("seq_len times n_ranks", tokens * group.n_ranks, 1)
    reset_hybrid_ep_buffer(group)
    buffer = _hybrid_ep_buffer.make(group)
    buffer.fp8_dispatch = bool(fp8_dispatch)
    buffer.remedy = "init_hybrid_ep_buffer(group, ...)"
    facts = dict(call="init_hybrid_ep_buffer", hidden_dim=hidden, seq_len=tokens)
    facts |= dict(num_local_experts=local, fp8_dispatch=buffer.fp8_dispatch)

    def make():
        buffer.log.agree(facts, buffer.timeout)
        buffer.want_tokens(tokens)
        _, nbytes = hybrid.staging_area(rows, 2 * hidden, local)
        buffer.make_room(facts["call"], local, staging_bytes=nbytes, flag_rows=rows)

    buffer.call("init_hybrid_ep_buffer", make)


def reset_hybrid_ep_buffer(group=None) -> None:
    """Free a group's HybridEP buffer (None: all), also to recover from an error; collective. Handles stay valid."""
    for key in list(_hybrid_ep_buffer) if group is None else [inputs.world("group", group)]:
        buffer = _hybrid_ep_buffer.get(key)
        if buffer is not None:
            if not (buffer.closed or buffer.world_has_lists):
                with suppress(EPStateError):  # of graphs, which close() ends; it raises others itself
                    buffer.reset()  # a failed call's messages to other processes are discarded
            buffer.close()
            _hybrid_ep_buffer.pop(key)


class Context:
    """Holds what forward saves for backward, where torch.autograd gives no ctx. Any object with attributes will do."""
