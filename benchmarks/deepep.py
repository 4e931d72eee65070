"""DeepEP, if it is installed: rows through Buffer.dispatch and combine, low latency, and V2's ElasticBuffer.

Written from the interfaces of releases 1.2.1 and 2.1.0; both ran on 4 H200. Each does the same work as our kernels: the
whole call from topk_ids on the device, with room for the worst case in its result, so that the host does not wait.
Bytes are the payload bytes that the routing moves, as for all contenders.
"""

import os

from benchmarks import traffic
from benchmarks.torch_peer import TorchPeer
from epmoe_ref.errors import UnavailableError

NVL_BYTES = 1 << 30
V1_SMS = 48  # its own default is 20
MANY_TOKENS = 1024  # from this many tokens on, V1_MANY is used
# by ranks, the fastest at 4096 tokens: multiprocessors, tokens in a chunk of dispatch and of combine
V1_MANY = {4: (96, 4, 6)}  # DeepEP leaves them to its users to tune
V1_ROOM = (256, 6, 128)  # the rest of a configuration, as in all of DeepEP's own for one host
LOW_LATENCY_MULTIPLE = 4  # of its most tokens a rank: n_ranks times that must be a multiple of 4
# DeepEP's variable and its value: room for two messages a token, and two more
QP_DEPTH = ("NVSHMEM_QP_DEPTH", 1024)


class _DeepEP(TorchPeer):
    """The common part of the three."""

    needs = "DeepEP"
    matrix = staticmethod(traffic.rows_matrix)

    def __init__(self, world, shape):
        super().__init__(world, shape)
        import deep_ep

        torch = self._torch
        self._package, self._group = deep_ep, torch.distributed.group.WORLD
        ids = torch.from_numpy(self._ids_of_all[world.rank])
        with torch.cuda.stream(self._on):
            self._ids = ids.to(getattr(deep_ep, "topk_idx_t", torch.int64)).cuda()
            self._weights = torch.full(self._ids.shape, 1 / shape.top_k, device="cuda")
            self._x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
            scales = torch.ones(shape.tokens, shape.hidden // traffic.SCALE_GROUP, device="cuda")
            self._given = (self._x.to(torch.float8_e4m3fn), scales) if shape.format == "fp8" else self._x
            # makes the communicator that V2 uses
            torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        self._buffer = self._handle = self._y = None

    def _rows(self, received):
        """Expert outputs for the received rows."""
        if isinstance(received, tuple):
            received = received[0]
        if self._y is None or self._y.shape != received.shape:
            self._y = self._torch.zeros(received.shape, dtype=self._torch.bfloat16, device="cuda")
        return self._y

    def close(self):
        """Free everything; collective."""
        self.check()
        self._buffer.destroy()
        self._x = self._given = self._y = self._handle = self._buffer = None
        self._torch.cuda.empty_cache()


class V1(_DeepEP):
    """get_dispatch_layout, dispatch and combine. host_waits: with exact sizes, which is the default."""

    name = "DeepEP V1"
    phases = ("dispatch", "combine")

    def __init__(self, world, shape, *, host_waits=False):
        super().__init__(world, shape)
        self._most = 0 if host_waits else world.n_ranks * shape.tokens
        self._package.Buffer.set_num_sms(V1_SMS)
        # of dispatch and combine; None: DeepEP's choice for this number of ranks
        self._configs = [None, None]
        if shape.tokens >= MANY_TOKENS and world.n_ranks in V1_MANY:
            sms, *chunks = V1_MANY[world.n_ranks]
            self._configs = [self._package.Config(sms, chunk, *V1_ROOM) for chunk in chunks]
        self._buffer = self._package.Buffer(self._group, NVL_BYTES, 0, explicitly_destroy=True)

    def dispatch(self):
        """Put a dispatch on torch's current stream."""
        buffer = self._buffer
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(self._ids, self.shape.experts)
        received, _, _, _, self._handle, _ = buffer.dispatch(
            self._given,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_worst_tokens=self._most,
            config=self._configs[0],
        )
        self._rows(received)

    def combine(self):
        """Put a combine on torch's current stream."""
        self._buffer.combine(self._y, self._handle, config=self._configs[1])


class LowLatency(_DeepEP):
    """low_latency_dispatch and low_latency_combine: one message for each (token, expert), weighted sums."""

    name = "DeepEP low latency"
    phases = ("dispatch", "combine")
    matrix = staticmethod(traffic.pairs_matrix)

    def __init__(self, world, shape):
        self._most = -(-shape.tokens // LOW_LATENCY_MULTIPLE) * LOW_LATENCY_MULTIPLE
        name, depth = QP_DEPTH
        depth = int(os.environ.get(name, depth))
        if 2 * (self._most + 1) > depth:
            raise UnavailableError(
                f"low latency takes at most {depth // 2 - 1} tokens a rank with {name}={depth}: for "
                f"{shape.tokens} set it to {2 * (self._most + 1)} or more"
            )
        super().__init__(world, shape)
        size = self._package.Buffer.get_low_latency_rdma_size_hint(
            self._most, shape.hidden, world.n_ranks, shape.experts
        )
        self._buffer = self._package.Buffer(
            self._group,
            0,
            size,
            low_latency_mode=True,
            num_qps_per_rank=shape.experts // world.n_ranks,
            explicitly_destroy=True,
        )

    def dispatch(self):
        """Put a dispatch on torch's current stream."""
        received, _, self._handle, _, _ = self._buffer.low_latency_dispatch(
            self._x, self._ids, self._most, self.shape.experts, use_fp8=self.shape.format == "fp8"
        )
        self._rows(received)

    def combine(self):
        """Put a combine on torch's current stream."""
        self._buffer.low_latency_combine(self._y, self._ids, self._weights, self._handle)


class V2(_DeepEP):
    """ElasticBuffer.dispatch and combine."""

    name = "DeepEP V2"
    phases = ("dispatch", "combine")

    def __init__(self, world, shape):
        super().__init__(world, shape)
        elastic = getattr(self._package, "ElasticBuffer", None)
        if elastic is None:
            raise UnavailableError("this DeepEP has no ElasticBuffer: it is V1")
        self._buffer = elastic(
            self._group,
            num_max_tokens_per_rank=shape.tokens,
            hidden=shape.hidden,
            num_topk=shape.top_k,
            use_fp8_dispatch=shape.format == "fp8",
            prefer_overlap_with_compute=False,
            explicitly_destroy=True,
        )

    def dispatch(self):
        """Put a dispatch on torch's current stream."""
        received, _, _, self._handle, _ = self._buffer.dispatch(
            self._given,
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_experts=self.shape.experts,
            do_cpu_sync=False,
        )
        self._rows(received)

    def combine(self):
        """Put a combine on torch's current stream."""
        self._buffer.combine(self._y, handle=self._handle)


KINDS = (V1, LowLatency, V2)
