"""DeepEP is called as its releases 1.2.1 and 2.1.0 are written: arguments, results, sizes.

DeepEP is seldom installed and needs GPUs, so a stand-in has its signatures and checks its rules. torch is a stand-in
too, so only calls are checked, not values.
"""

import inspect
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


def called_as(parameters):
    """Decorator: a method with these parameters, as the release's source has them, which get to its body by name."""
    signature = inspect.signature(eval(f"lambda self, {parameters}: None"))

    def decorated(body):
        def method(*args, **keywords):
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            return body(bound.arguments.pop("self"), SimpleNamespace(**bound.arguments))

        return method

    return decorated


STREAM = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
STREAM_V2 = (
    "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False"
)


class Buffer:
    """deep_ep.Buffer: get_dispatch_layout, dispatch, combine and low_latency_*, alike in both releases."""

    num_sms = 20

    @called_as(
        "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
        "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False"
    )
    def __init__(self, given):
        assert given.group == "world"
        assert (given.num_nvl_bytes > 0) != given.low_latency_mode == (given.num_rdma_bytes > 0)
        self.explicitly_destroy, self.alive = given.explicitly_destroy, True
        self.qps = given.num_qps_per_rank

    def destroy(self):
        assert self.explicitly_destroy and self.alive
        self.alive = False

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

    @called_as(f"topk_idx, num_experts, {STREAM}")
    def get_dispatch_layout(self, given):
        return "per rank", None, "per expert", "is in rank", "event"

    @called_as(
        "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
        "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, "
        f"num_worst_tokens=0, config=None, {STREAM}"
    )
    def dispatch(self, given):
        assert given.handle is None and given.num_tokens_per_rdma_rank is None
        assert (given.num_tokens_per_rank, given.is_token_in_rank) == ("per rank", "is in rank")
        assert given.num_tokens_per_expert == "per expert"
        assert given.topk_idx is not None and given.topk_weights is not None
        self.received = received_like(given.x, (given.num_worst_tokens, 7168))
        self.configs = [given.config]
        return self.received, "topk_idx", "topk_weights", [], "handle", "event"

    @called_as(f"x, handle, topk_weights=None, bias=None, config=None, {STREAM}")
    def combine(self, given):
        assert given.handle == "handle"
        assert given.config is None or given.config.num_sms == self.configs[0].num_sms, (
            "each has its channels by multiprocessors"
        )
        self.combined, self.configs = given.x, [*self.configs, given.config]
        return "combined", None, "event"

    @called_as(
        "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
        "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
        "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False"
    )
    def low_latency_dispatch(self, given):
        most, local = given.num_max_dispatch_tokens_per_rank, given.num_experts // N_RANKS
        assert not isinstance(given.x, tuple) and N_RANKS * most % 4 == 0
        assert 2 * (most + 1) <= int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        assert self.qps == local
        x = (given.x, given.x) if given.use_fp8 else given.x
        self.received = received_like(x, (local, N_RANKS * most, 7168))
        return self.received, "count", "handle", "event", "hook"

    @called_as(
        "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
        "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None"
    )
    def low_latency_combine(self, given):
        assert given.handle == "handle"
        self.combined = given.x
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

    @called_as(
        "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
        "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, "
        "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False"
    )
    def __init__(self, given):
        assert given.group == "world" and given.num_bytes is None and given.num_max_tokens_per_rank
        assert given.hidden == 7168 and given.num_topk == 8
        self.explicitly_destroy, self.alive = given.explicitly_destroy, True
        self.most, self.fp8 = given.num_max_tokens_per_rank, given.use_fp8_dispatch

    destroy = Buffer.destroy

    @called_as(
        "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
        f"num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, {STREAM_V2}, "
        "handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
        "use_tma_aligned_col_major_sf=False"
    )
    def dispatch(self, given):
        assert given.topk_idx is not None and given.num_experts == 256
        assert given.handle is None and given.do_cpu_sync is False
        assert isinstance(given.x, tuple) == self.fp8
        self.received = received_like(given.x, (N_RANKS * self.most, 7168))
        return self.received, "topk_idx", "topk_weights", "handle", "event"

    @called_as(f"x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, {STREAM_V2}")
    def combine(self, given):
        assert given.handle == "handle"
        self.combined = given.x
        return "combined", None, "event"


V2_PACKAGE = SimpleNamespace(Buffer=Buffer, Config=Config, ElasticBuffer=ElasticBuffer, topk_idx_t="int64")
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
    assert isinstance(buffer.received, tuple) == (format == "fp8")
    assert buffer.combined.shape == rows.shape
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
    assert v1_configs(world, Shape(tokens, 7168, 256)) == [None, None] and Buffer.num_sms == deepep.V1_SMS


def test_v1_at_many_tokens_on_4_ranks_is_configured_as_was_fastest(world):
    world.n_ranks = 4
    dispatch, combine = v1_configs(world, Shape(4096, 7168, 256))
    assert dispatch.num_sms == combine.num_sms == 96
    assert [c.num_max_nvl_chunked_send_tokens for c in (dispatch, combine)] == [4, 6]
    for config in (dispatch, combine):  # deep_ep::Config asserts this; the buffer is large enough
        assert config.num_max_nvl_chunked_send_tokens < config.num_max_nvl_chunked_recv_tokens
        channels = config.num_sms // 2
        assert channels * 4 * config.num_max_nvl_chunked_recv_tokens * (2 * 7168 + 2048) < deepep.NVL_BYTES


def test_more_tokens_than_low_latency_takes_are_refused_with_the_remedy(world, monkeypatch):
    shape = Shape(1024, 7168, 256)
    with pytest.raises(UnavailableError, match="at most 511 tokens.*NVSHMEM_QP_DEPTH=1024.*2050 or more"):
        deepep.LowLatency(world, shape)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2050")
    deepep.LowLatency(world, shape).launch("dispatch")


def test_of_the_older_release_there_is_all_but_v2(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", V1_PACKAGE)
    for kind in (deepep.V1, deepep.LowLatency):
        kind(world, Shape(128, 7168, 256)).close()
    with pytest.raises(UnavailableError, match="no ElasticBuffer"):
        deepep.V2(world, Shape(128, 7168, 256))
