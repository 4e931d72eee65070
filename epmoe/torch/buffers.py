"""Functions that make and free a group's memory, also for process groups of torch.distributed."""

from epmoe import fused_a2a
from epmoe.torch.process_group import world_of


def get_buffer(group, hidden_bytes: int):
    """The Buffer of a group for fused_dispatch and fused_combine, made if there is none; one per world, until closed.

    group: a process group of torch, or a world of epmoe. hidden_bytes: bytes of a row (get_hidden_bytes), at
    least 0; it changes nothing, since the Buffer's memory grows when a call needs more, on all ranks in the same
    call. Collective if it makes a Buffer. Returns an epmoe.fused_a2a.Buffer, which has reset(), for use after an
    error, and close(). Errors: EPValueError, UnavailableError, PeerTimeout. Source: the fused_a2a page
    (docs/pages.md); epmoe.fused_a2a.get_buffer.
    """
    return fused_a2a.get_buffer(world_of(group), hidden_bytes)


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

    group: as for get_buffer. hidden_dim: H, elements of a row, 2 bytes each. seq_len: the most tokens T of any rank.
    num_local_experts: L, experts of a rank. All three are whole numbers from 1, the same on all ranks; larger ones in a
    later call make the buffer grow, on all ranks in the same call. num_sms_dispatch_api, num_sms_combine_api: at least
    1, or None; they are checked but not kept, since each hybrid_ep_dispatch gets its own. fp8_dispatch: True or False,
    the same on all ranks; if True, which upstream refuses, hybrid_ep_dispatch takes bf16 [T, H] with H a multiple of
    128, and returns e4m3 [P, H] and scales float32 [P, H / 128], which carry no gradient. Without this call
    hybrid_ep_dispatch makes a buffer without FP8. For an earlier buffer's results, handles and graphs see
    reset_hybrid_ep_buffer. Keyword-only: Megatron-Core 0.17 to 0.19's scheduling; no effect. Errors: EPValueError,
    UnavailableError, PeerTimeout. Source: the fused_a2a page (docs/pages.md); epmoe.fused_a2a.init_hybrid_ep_buffer.
    """
    sms = num_sms_dispatch_api, num_sms_combine_api
    fused_a2a.init_hybrid_ep_buffer(world_of(group), hidden_dim, seq_len, num_local_experts, *sms, fp8_dispatch)


def reset_hybrid_ep_buffer(group=None) -> None:
    """Free the HybridEP buffer of a group (None: of every group in this process), if there is one; collective.

    Call it on all ranks to recover from an error. group: as for get_buffer. The host waits for calls that still run.
    Results and handles stay valid. CUDA graphs that captured calls on this buffer must not be replayed any more. The
    next hybrid_ep_dispatch makes a new buffer, without FP8. A process group that has not been used before becomes a
    world first. Errors: EPValueError, UnavailableError, PeerTimeout. Source: epmoe.fused_a2a.reset_hybrid_ep_buffer.
    """
    fused_a2a.reset_hybrid_ep_buffer(None if group is None else world_of(group))
