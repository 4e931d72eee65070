"""One run of a world with one set of kernels: all rounds of all ranks in flight at once, then every check."""

import numpy as np

from epmoe import device, layout
from epmoe.check import compare_combined_world, compare_dispatched_world
from epmoe.kernels import LaunchConfig, Wanted, formats, lamport, status
from epmoe.kernels.pairs import few_tokens
from epmoe.kernels.pairs.tuning import Tuning
from epmoe.kernels.params import float32_word
from epmoe.mutants import experts, expired
from epmoe.mutants.errors import Leftover, WrongResult
from epmoe.mutants.world_inputs import BF16, expected, inputs, last_payloads

MAX_FINITE = np.uint64(layout.MAX_FINITE)
ZERO_AFTER = ("reserved", "finished", "rank_completion", "A", "D", "E", "F", "G", "combine_ready")


def new_buffer(machine, name, rank, shape, dtype):
    """A buffer with one region of that name, so that the simulator knows its bounds."""
    nbytes, region = int(np.prod(shape)) * np.dtype(dtype).itemsize, (name, 0, shape, np.dtype(dtype), ())
    return machine.alloc(nbytes, name, rank, regions=[region])


class WorldRun:
    """Memory and launches of one run. kernels: epmoe.kernels or an edited copy. simulation: options of the machine."""

    def __init__(self, world, kernels, seed, *, racecheck=True, **simulation):
        self.world, self.cfg, self.kernels = world, world.cfg, kernels
        self.machine = device.machine(
            self.cfg.n_ranks, seed=seed, racecheck=racecheck, n_sms=8, expire_waits=world.fails, **simulation
        )
        self.machine.slow_ranks = world.slow
        self.format = formats.of(self.cfg)
        self.ranks = [r for r in range(self.cfg.n_ranks) if r not in world.absent]
        self.streams = {r: self.machine.stream(r) for r in self.ranks}
        self.regions = [self._regions(r) for r in range(self.cfg.n_ranks)]
        self.heaps = []
        if self.cfg.use_shmem:
            self._connect()
        self.buffers, self.gated, self.calls = [], [], self._calls()
        self.capacity = self._capacity()

    def _regions(self, rank):
        """{name: Buffer}, with a separate allocation for each region, so that the simulator knows its bounds."""
        made = {}
        for r in layout.regions(self.cfg):
            words = [(r.name, 0, r.shape, r.dtype, r.index_names)]
            if r.name == "ep_counters":
                words = [(c.name, c.offset, c.shape, c.dtype, c.index_names) for c in layout.counter_regions(self.cfg)]
            made[r.name] = self.machine.alloc(r.nbytes, r.name, rank, regions=words)
            if r.initial is not None:
                made[r.name].write(np.full(r.shape, r.initial, r.dtype))
        return made

    def _connect(self):
        """Make each region symmetric memory, so that other p2p worlds can put into it."""
        for name, buffer in self.regions[0].items():
            self.heaps.append([regions[name].address for regions in self.regions])
            self.machine.network.connect(self.heaps[-1], buffer.nbytes)

    def _calls(self):
        launch = LaunchConfig(*self.world.shape)
        weights = dict(router_weights=None if self.world.unreduced else "array")
        self.returned_to = lamport.recv_buf_name(self.cfg, self.world.without_signals, weights["router_weights"])
        ways = dict(without_signals=True) if self.world.without_signals else {}
        tuned = dict(tuning=Tuning(**self.world.tuning)) if self.world.tuning else {}
        make = self.kernels
        calls = dict(swiglu=experts.swiglu_of(make, self.cfg, launch)) if self.world.swiglu else {}
        if self.world.fused:
            return calls | dict(
                dispatch=make.dispatch_kernel(self.cfg, launch, **tuned),
                combine=make.combine_kernel(self.cfg, launch, **weights, **ways, **tuned),
            )
        return calls | dict(
            dispatch_async=make.dispatch_async_kernel(self.cfg, launch, **tuned),
            dispatch_wait=make.dispatch_wait_kernel(self.cfg, launch, **tuned),
            combine_async=make.combine_async_kernel(self.cfg, launch, **tuned),
            combine_wait=make.combine_wait_kernel(self.cfg, launch, **weights, **tuned),
        )

    def _capacity(self):
        c = self.cfg
        rows = c.n_src_ranks * c.max_tokens_per_rank * min(c.top_k, c.n_local_experts)
        return rows + c.max_tokens_per_rank * c.fused_shared_expert + (self.format.pad_rows - 1) * c.n_groups

    # ------------------------------------------------------------------ memory
    def new(self, name, rank, shape, dtype):
        """A new buffer with one named region."""
        self.buffers.append(new_buffer(self.machine, name, rank, shape, dtype))
        return self.buffers[-1]

    def outputs(self, rank):
        """{name: (new buffer, shape, dtype)} of dispatch's outputs."""
        cfg = self.cfg
        shapes = self.format.outputs(cfg, self.capacity) | {
            "row_offsets": ((cfg.n_groups + 1,), np.uint32),
            "expert_ids": ((cfg.n_groups,), np.int32),
            "src_info": ((self.capacity, 2), np.int32),
            "recv_count": ((cfg.n_local_experts, cfg.n_src_ranks), np.int32),
        }
        return {name: (self.new(name, rank, shape, dtype), shape, dtype) for name, (shape, dtype) in shapes.items()}

    def put(self, name, rank, array):
        """Address of a new buffer that holds an array."""
        buffer = self.new(name, rank, array.shape, array.dtype)
        buffer.write(array)
        return buffer.address

    def at(self, rank, name):
        return self.regions[rank][name].address

    def peers(self, rank, name):
        """Addresses of a region on the ranks of the p2p world."""
        first = rank // self.cfg.p2p_world_size * self.cfg.p2p_world_size
        return [self.at(first + i, name) for i in range(self.cfg.p2p_world_size)]

    # ------------------------------------------------------------------ launches
    def go(self):
        """Run all rounds. Raises any error of the simulator or the check."""
        rounds = []
        try:
            with self.machine.hold():
                for x, given, _, weights in inputs(self.world):
                    rounds.append({r: self._launch_round(r, x[r], given[r], weights[r]) for r in self.ranks})
            self._check(rounds)
        finally:
            self._free()

    def _launch_round(self, rank, x, ids, weights):
        cfg, n = self.cfg, len(x)
        tokens = self.put("input_tokens", rank, x)
        topk_ids = self.put("topk_ids", rank, ids)
        clean = self.new("clean_topk_ids", rank, (cfg.max_tokens_per_rank, cfg.top_k), np.int32)
        out = self.outputs(rank)
        written = [b.address for b, _, _ in out.values()]
        written.insert(len(self.format.output_fields), self.capacity)
        if self.world.stuck == "dispatch" and rank == 0:
            expired.spoil(self)
        words = tokens, topk_ids, clean.address, float32_word(1.0), *written
        self._start("dispatch", rank, n, "dispatch_recv_buf", words)
        rows = self.new("expert_outputs", rank, (self.capacity, cfg.hidden), BF16)
        # otherwise row_offsets is undefined
        if not (self.world.absent or self.world.stuck == "dispatch"):
            experts.launch(self, rank, out["output_tokens"][0], out["row_offsets"][0], rows)
        if self.world.stuck == "combine" and rank == 0:
            expired.spoil(self)
        shape = (n, cfg.top_k, cfg.hidden) if self.world.unreduced else (n, cfg.hidden)
        combined = self.new("combined", rank, shape, BF16)
        weights = 0 if self.world.unreduced else self.put("router_weights", rank, weights)
        src_info = out["src_info"][0].address
        words = rows.address, src_info, 0, combined.address, clean.address, weights
        self._start("combine", rank, n, self.returned_to, words)
        out["topk_ids"] = (clean, (n, cfg.top_k), np.int32)
        return out, (combined, shape, BF16)

    def _start(self, phase, rank, num_tokens, recv_buf, words):
        """Launch the kernels of a phase. Each reads the words that it needs."""
        sends = phase == "dispatch" or self.cfg.use_shmem
        regions = dict(
            send_buf_p=self.at(rank, f"{phase}_send_buf") if sends else 0,
            recv_buf_ptrs=self.peers(rank, recv_buf),
            recv_count_ptrs=self.peers(rank, f"{phase}_recv_count"),
            recv_buf_p=self.at(rank, recv_buf),
            recv_count_p=self.at(rank, f"{phase}_recv_count"),
            ep_counters=self.at(rank, "ep_counters"),
            status=self.at(rank, "status"),
        )
        wanted = Wanted(num_tokens, rank, self.machine, self.streams[rank], regions, 1.0)
        for name in (phase,) if self.world.fused else (f"{phase}_async", f"{phase}_wait"):
            self.calls[name].prepared(wanted).start(*words)

    # ------------------------------------------------------------------ checks
    def _check(self, rounds):
        if self.world.fails:
            return expired.check(self, rounds)
        for number, (results, (dispatched, combined)) in enumerate(zip(rounds, expected(self.world)), 1):
            got = [
                {name: b.read(dtype, shape) for name, (b, shape, dtype) in results[r][0].items()} for r in self.ranks
            ]
            differences = compare_dispatched_world(self.cfg, got, dispatched)
            outputs = [b.read(dtype, shape) for b, shape, dtype in (results[r][1] for r in self.ranks)]
            differences += compare_combined_world(self.cfg, outputs, combined)
            if differences:
                raise WrongResult(f"round {number}: {differences[0]}")
        experts.check_gated(self)
        for rank in self.ranks:
            self._check_memory(rank)

    def _check_memory(self, rank):
        for name in ZERO_AFTER:
            self._expect(rank, name, self.counters(rank, name), 0)
        counts = self.cfg.n_local_experts, self.cfg.n_src_ranks
        for name in ("dispatch_recv_count", "combine_recv_count"):
            self._expect(rank, name, self.regions[rank][name].array(np.uint64, counts), MAX_FINITE)
        if layout.has_lamport_buf(self.cfg):
            name = "combine_lamport_buf"
            shape = layout.region(self.cfg, name).shape
            self._expect(rank, name, self.regions[rank][name].array(np.uint32, shape), layout.ABSENT)
        if not (self.may_send_few(rank, -1) or self.format.direct):
            payload = last_payloads(self.world)[rank]
            shape = len(payload), layout.message(self.cfg).msg_bytes
            held = self.regions[rank]["dispatch_send_buf"].array(np.uint8, shape)
            if (held[:, : self.format.token_size] != payload).any():
                raise WrongResult(f"send_buf of rank {rank}: an encoded token differs, or its padding is not zero")
        words = self.regions[rank]["status"].array(np.int32, layout.STATUS_WORDS)
        if not self.world.bad_ids:
            self._expect(rank, "status", words, 0)
            return
        _, given, ids, _ = inputs(self.world)[0]
        different = given[rank] != ids[rank]
        inside = (given[rank] >= 0) & (given[rank] < self.cfg.n_experts) & different
        counts = [int((different & ~inside).sum()), int(inside.sum())]
        token, k, value = (int(words[i]) for i in (status.BAD_TOKEN, status.BAD_K, status.BAD_ID))
        if (
            words[[status.BAD_IDS, status.REPEATED_IDS]].tolist() != counts
            or given[rank][token - 1, k] != value
            or not different[token - 1, k]
        ):
            raise WrongResult(f"status of rank {rank} is {words.tolist()}; bad and repeated ids: {counts}")

    def may_send_few(self, rank, round):
        """Whether a rank's dispatch may use few_tokens.py, which needs neither `reserved` nor send_buf."""
        most = few_tokens.most(self.cfg, LaunchConfig(*self.world.shape), Tuning(**self.world.tuning))
        return self.world.tokens[round][rank] <= most

    def counters(self, rank, name):
        """A counter region, as a view."""
        region = next(c for c in layout.counter_regions(self.cfg) if c.name == name)
        return self.regions[rank]["ep_counters"].array(np.int32, region.shape, region.offset)

    def _expect(self, rank, name, words, value):
        if (words != value).any():
            raise Leftover(f"{name} of rank {rank} holds {words[words != value].flat[0]} after the rounds, not {value}")

    def _free(self):
        for addresses in self.heaps:
            self.machine.network.disconnect(addresses)
        for call in self.calls.values():
            call.close()
        for buffer in [*self.buffers, *(b for regions in self.regions for b in regions.values())]:
            buffer.free()
