"""DeepEP is called as its releases 1.2.1 and 2.1.0 are written: arguments, results, sizes.

DeepEP is seldom installed and needs GPUs, so a stand-in has its signatures and checks its rules. torch is a stand-in
too, so only calls are checked, not values.
"""

import os
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks import deepep, torch_peer, traffic
from benchmarks.shapes import Shape
from epmoe_ref.errors import UnavailableError

N_RANKS = 2


class Buffer:
    """deep_ep.Buffer: get_dispatch_layout, dispatch, combine and low_latency_*, alike in both releases."""

    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
    ):
        assert group == "world" and (num_nvl_bytes > 0) != low_latency_mode == (num_rdma_bytes > 0)
        self.explicitly_destroy, self.alive, self.qps = explicitly_destroy, True, num_qps_per_rank

    def destroy(self):
        assert self.explicitly_destroy and self.alive
        self.alive = False

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
    ):
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        return "per rank", None, "per expert", "is in rank", "event"

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert handle is None and num_tokens_per_rdma_rank is None
        assert (num_tokens_per_rank, is_token_in_rank) == ("per rank", "is in rank")
        assert num_tokens_per_expert == "per expert"
        assert topk_idx is not None and topk_weights is not None
        self.received, self.configs = received_like(x, (num_worst_tokens, 7168)), [config]
        return self.received, "topk_idx", "topk_weights", [], "handle", "event"

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert handle == "handle"
        assert config is None or config.num_sms == self.configs[0].num_sms, (
            "each has its channels by multiprocessors"
        )
        self.combined, self.configs = x, [*self.configs, config]
        return "combined", None, "event"

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        assert not isinstance(x, tuple) and N_RANKS * num_max_dispatch_tokens_per_rank % 4 == 0
        assert 2 * (num_max_dispatch_tokens_per_rank + 1) <= int(
            os.environ.get("NVSHMEM_QP_DEPTH", "1024")
        )
        assert self.qps == num_experts // N_RANKS
        self.received = received_like(
            (x, x) if use_fp8 else x,
            (num_experts // N_RANKS, N_RANKS * num_max_dispatch_tokens_per_rank, 7168),
        )
        return self.received, "count", "handle", "event", "hook"

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        assert handle == "handle"
        self.combined = x
        return "combined", "event", "hook"


class Config(NamedTuple):
    """deep_ep.Config: tokens in a chunk, and the capacity of a channel."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256


class ElasticBuffer:
    """deep_ep.ElasticBuffer, only in 2.1.0."""

    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        assert (
            group == "world"
            and num_bytes is None
            and num_max_tokens_per_rank
            and hidden == 7168
            and num_topk == 8
        )
        self.explicitly_destroy, self.alive, self.fp8 = explicitly_destroy, True, use_fp8_dispatch
        self.most = num_max_tokens_per_rank

    destroy = Buffer.destroy

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        assert (
            topk_idx is not None and num_experts == 256 and handle is None and do_cpu_sync is False
        )
        assert isinstance(x, tuple) == self.fp8
        self.received = received_like(x, (N_RANKS * self.most, 7168))
        return self.received, "topk_idx", "topk_weights", "handle", "event"

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        assert handle == "handle"
        self.combined = x
        return "combined", None, "event"


V2_PACKAGE = SimpleNamespace(
    Buffer=Buffer, Config=Config, ElasticBuffer=ElasticBuffer, topk_idx_t="int64"
)
V1_PACKAGE = SimpleNamespace(Buffer=Buffer, Config=Config)


def received_like(x, shape):
    """The rows that arrive for x: of its shape, with scales if x has some."""
    rows = SimpleNamespace(shape=shape)
    return (rows, "scales") if isinstance(x, tuple) else rows


@pytest.fixture
def world(monkeypatch):
    """One of two ranks, with the stand-ins for torch and for deep_ep 2.1.0."""
    torch = MagicMock()
    torch.distributed.group.WORLD = "world"
    torch.zeros.side_effect = lambda *shape, **_: SimpleNamespace(shape=shape[0])

    def init(self, world, shape):
        self._torch, self._on, self.world, self.shape = torch, None, world, shape
        self._ids_of_all = traffic.topk_ids(shape, N_RANKS)
        self._messages = self.matrix(shape, self._ids_of_all)

    monkeypatch.setattr(torch_peer.TorchPeer, "__init__", init)
    monkeypatch.setitem(sys.modules, "deep_ep", V2_PACKAGE)
    monkeypatch.setattr(Buffer, "num_sms", 20)
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    return SimpleNamespace(rank=0, n_ranks=N_RANKS)


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 128])
@pytest.mark.parametrize("kind", deepep.KINDS, ids=lambda kind: kind.name)
def test_every_call_is_one_that_deepep_takes(kind, tokens, format, world):
    contender = kind(world, Shape(tokens, 7168, 256, format=format))
    buffer = contender._buffer
    for _ in range(2):
        for phase in contender.phases:
            contender.launch(phase)
    rows = buffer.received[0] if format == "fp8" else buffer.received
    assert (
        isinstance(buffer.received, tuple) == (format == "fp8")
        and buffer.combined.shape == rows.shape
    )
    assert np.prod(rows.shape) > 0, "room for the worst case: the host does not wait"
    contender.close()
    assert not buffer.alive


def v1_configs(world, shape):
    """The configurations with which V1's dispatch and combine are called."""
    contender = deepep.V1(world, shape)
    for phase in contender.phases:
        contender.launch(phase)
    return contender._buffer.configs


@pytest.mark.parametrize("n_ranks, tokens", [(4, 128), (2, 4096)])
def test_v1_has_as_many_multiprocessors_as_make_it_fastest(n_ranks, tokens, world):
    world.n_ranks = n_ranks
    assert (
        v1_configs(world, Shape(tokens, 7168, 256)) == [None, None]
        and Buffer.num_sms == deepep.V1_SMS
    )


def test_v1_at_many_tokens_on_4_ranks_is_configured_as_was_fastest(world):
    world.n_ranks = 4
    dispatch, combine = v1_configs(world, Shape(4096, 7168, 256))
    assert dispatch.num_sms == combine.num_sms == 96
    assert (dispatch.num_max_nvl_chunked_send_tokens, combine.num_max_nvl_chunked_send_tokens) == (
        4,
        6,
    )
    for config in (
        dispatch,
        combine,
    ):  # deep_ep::Config asserts this; and the buffer is large enough
        assert config.num_max_nvl_chunked_send_tokens < config.num_max_nvl_chunked_recv_tokens
        channels = config.num_sms // 2
        assert (
            channels * 4 * config.num_max_nvl_chunked_recv_tokens * (2 * 7168 + 2048)
            < deepep.NVL_BYTES
        )


def test_more_tokens_than_low_latency_takes_are_refused_with_the_remedy(world, monkeypatch):
    shape = Shape(1024, 7168, 256)
    with pytest.raises(
        UnavailableError, match="at most 511 tokens.*NVSHMEM_QP_DEPTH=1024.*2050 or more"
    ):
        deepep.LowLatency(world, shape)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2050")
    deepep.LowLatency(world, shape).launch("dispatch")


def test_of_the_older_release_there_is_all_but_v2(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", V1_PACKAGE)
    for kind in (deepep.V1, deepep.LowLatency):
        kind(world, Shape(128, 7168, 256)).close()
    with pytest.raises(UnavailableError, match="no ElasticBuffer"):
        deepep.V2(world, Shape(128, 7168, 256))
