"""Experts between dispatch and combine, as a kernel and in NumPy. They compute simple numbers from the received bytes.

A row's element j is (byte j of the row, modulo its length, + 11 (j // 64)) & 63, plus 64 times the group modulo 4.
It is exact in bf16, differs if a row is stale, missing or of another expert, and differs in size between the two
halves of a row.
"""

from importlib import import_module

import ml_dtypes
import numpy as np

from epmoe.device import (
    block_dim,
    block_idx,
    f32,
    f32_as_u32,
    grid_dim,
    i32,
    kernel,
    load_i32,
    load_u32,
    load_u64,
    store16,
    thread_idx,
    u32,
    u64,
)
from epmoe.kernels import Wanted, formats
from epmoe.mutants.errors import WrongResult
from epmoe_ref.swiglu import fused_silu, fused_silu_fp8

GRID, THREADS = 2, 32
GROUP = 128  # elements that share a scale


def row_bytes(cfg):
    """Bytes of a row of output_tokens."""
    shape, dtype = formats.of(cfg).outputs(cfg, 1)["output_tokens"]
    return int(np.prod(shape[1:])) * np.dtype(dtype).itemsize


def reference(cfg, dispatched):
    """Expert outputs [rows, hidden] bf16 of a rank's Dispatched."""
    n = len(dispatched.output_tokens)
    held = np.ascontiguousarray(dispatched.output_tokens).view(np.uint8).reshape(n, row_bytes(cfg))
    group = np.searchsorted(dispatched.row_offsets[1:], np.arange(n), side="right")
    columns = np.arange(cfg.hidden)
    codes = (held[:, columns % held.shape[1]] + 11 * (columns // 64)) & 63
    return (codes + 64 * (group[:, None] & 3)).astype(np.float32).astype(ml_dtypes.bfloat16)


def _as_bf16(byte, more, group):
    return u32(f32_as_u32(f32(u32(u32(byte + u32(more)) & u32(63)) + 64 * (group & 3))) >> u32(16))


def _pair(word, shift, more, group):
    low, high = word >> u32(shift), word >> u32(shift + 8)
    return u32(_as_bf16(low, more, group) | u32(_as_bf16(high, more, group) << u32(16)))


def _kernel(hidden, n_bytes, n_groups):
    @kernel
    def run_experts(params, num_tokens, my_rank):
        rows, offsets, out = load_u64(params), load_u64(params + 8), load_u64(params + 16)
        n_rows = load_i32(offsets + u64(4 * n_groups))
        row, group = i32(block_idx() * block_dim() + thread_idx()), i32(0)
        while row < n_rows:
            while row >= load_i32(offsets + u64(4 * (group + 1))):
                group = i32(group + 1)
            column = i32(0)
            while column < hidden:
                at = rows + u64(row * n_bytes + column % n_bytes)
                low, high = load_u32(at), load_u32(at + u64(4))
                more = i32(11 * (column // 64))
                store16(
                    out + u64(2 * (row * hidden + column)),
                    _pair(low, 0, more, group),
                    _pair(low, 16, more, group),
                    _pair(high, 0, more, group),
                    _pair(high, 16, more, group),
                )
                column = i32(column + 8)
            row = i32(row + grid_dim() * block_dim())

    return run_experts


def launch(run, rank, output_tokens, row_offsets, expert_outputs):
    """Queue the experts of a rank after its dispatch, and then a SwiGLU of their rows. All three arrays are Buffers."""
    cfg = run.cfg
    addresses = np.array([output_tokens.address, row_offsets.address, expert_outputs.address], np.uint64)
    params = run.put("parameters of the experts", rank, addresses)
    run.machine.launch(
        _kernel(cfg.hidden, row_bytes(cfg), cfg.n_groups), GRID, THREADS, (params, 0, rank), stream=run.streams[rank]
    )
    if "swiglu" in run.calls:
        width = cfg.hidden // 2
        scales = run.new("swiglu scales", rank, (max(1, width // GROUP), run.capacity), np.float32)
        gated = run.new("swiglu output", rank, (run.capacity, cfg.hidden), np.uint8)
        addresses = [array.address for array in (expert_outputs, row_offsets, gated, scales)]
        wanted = Wanted(0, rank, run.machine, run.streams[rank], {})
        run.calls["swiglu"].prepared(wanted).start(*addresses, run.capacity)
        run.gated.append((rank, expert_outputs, row_offsets, gated, scales))


def check_gated(run):
    """Raise WrongResult if a SwiGLU's codes differ from the reference by more than one step."""
    cfg, width = run.cfg, run.cfg.hidden // 2
    for rank, rows, row_offsets, gated, scales in run.gated:
        offsets = row_offsets.read(np.int32, (cfg.n_groups + 1,))
        rows, n = rows.read(ml_dtypes.bfloat16, (run.capacity, cfg.hidden)), offsets[-1]
        if width % GROUP:
            wrong, want = [], fused_silu(rows, offsets).view(np.int16)
        else:
            want, want_scales = (x.view(t) for x, t in zip(fused_silu_fp8(rows, offsets), (np.int8, np.float32)))
            got = scales.read(np.float32, (width // GROUP, run.capacity))[:, :n]
            wrong = np.argwhere(~np.isclose(got, want_scales, rtol=1e-5))
        codes = gated.read(want.dtype, (run.capacity, width))[:n]
        wrong = [*wrong, *np.argwhere(abs(codes.astype(int) - want) > 1)]
        if wrong:
            raise WrongResult(f"rank {rank}: SwiGLU's code or scale at {wrong[0].tolist()} is not the reference's")


def swiglu_of(kernels, cfg, launch):
    """The SwiGLU call on rows of cfg.hidden of a kernel package: FP8 if the rows are wide enough, else bf16."""
    width = cfg.hidden // 2
    kind = "bf16" if width % GROUP else "fp8_blockwise"
    return import_module(f"{kernels.__name__}.swiglu").fused_silu_kernel(
        cfg, launch, intermediate=width, output_format=kind
    )
