"""SwiGLU between the two matrix products of the experts, for rows whose number only the device knows.

A row of the input holds gate and up: its two halves. The kernels read the number of rows from row_offsets in device
memory, so dispatch, experts and combine can be enqueued without the host waiting for the counts in between. Float32
inside, one rounding at the end. exp is not exactly rounded: results agree with the reference within one bf16 ulp
(FP8: one code), and are no part of the bit-exact promise.
"""

from epmoe.device import (abs_f32, add_rn, bf16_hi, bf16_lo, block_idx, device_fn, div_rn, exp, f32, grid_dim, i32,
                          kernel, lane_id, load16, load_i32, max_f32, mul_rn, n_warps, pack_bf16x2, store16,
                          store_f32, sub_rn, u64, warp_id)
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

from .bits import over_lanes
from .formats.number_codes import e4m3x4
from .formats.row_encoder import maximum
from .launch import KernelCall, LaunchConfig
from .params import LANES, ParameterBlock

GROUP = 128                 # elements that share a scale, in FP8 output
GROUP_LANES = 8             # 16 elements each: one 16-byte store of e4m3
MULTIPLE = {"bf16": 8, "fp8_blockwise": GROUP}
BLOCK = ParameterBlock(("input_tokens", 1), ("row_offsets", 1), ("output_tokens", 1), ("output_scales", 1),
                       ("capacity", 1))
INPUT, OFFSETS, OUTPUT = BLOCK.index("input_tokens"), BLOCK.index("row_offsets"), BLOCK.index("output_tokens")
SCALES, CAPACITY = BLOCK.index("output_scales"), BLOCK.index("capacity")


def fused_silu_kernel(cfg: EPConfig, launch: LaunchConfig | None = None, *, intermediate: int,
                      output_format: str = "bf16", limit: float | None = None, alpha: float = 1.702) -> KernelCall:
    """A kernel that turns rows [capacity, 2 intermediate] bf16 into rows [capacity, intermediate] bf16 or e4m3.

    It is started with the words of BLOCK. Rows [0, row_offsets[n_groups]) are written, padding rows between groups included
    (what comes out of unspecified rows is unspecified). output_scales: with e4m3 output, float32 [intermediate / 128,
    capacity], transposed, rows as in the input; so the padded row_offsets of an fp8_blockwise dispatch give the padded layout.

    gate * sigmoid(gate) * up; with a limit L, (u + 1) * g * sigmoid(alpha * g) of g = min(gate, L) and
    u = clamp(up, -L, L). NaN passes through. output_format: "bf16", or "fp8_blockwise": e4m3 and a float32 scale,
    max(absmax, 1e-4) / 448, for 128 elements. Errors: EPValueError. Source: the fused_silu kernels that go with the
    dispatch_kernel page.
    """
    if output_format not in MULTIPLE:
        raise EPValueError(f"output_format={output_format!r} must be one of {', '.join(MULTIPLE)}")
    multiple = MULTIPLE[output_format]
    if intermediate < multiple or intermediate % multiple:
        raise EPValueError(f"intermediate={intermediate} must be a positive multiple of {multiple} for "
                           f"output_format={output_format!r}: pad the experts' inner dimension")
    if limit is not None and not limit > 0:
        raise EPValueError(f"limit={limit} must be positive, or None for the plain variant")
    gated = plain_gate if limit is None else clamped_gate(limit, alpha)
    n_chunks, piece = (bf16_rows if output_format == "bf16" else fp8_rows)(intermediate, gated)
    n_segments, n_groups = -(-n_chunks // LANES), cfg.n_groups

    @kernel(words=BLOCK.n_words)
    def fused_silu(params, num_tokens, my_rank):
        n_rows = min(load_i32(params[OFFSETS] + u64(4 * n_groups)), i32(params[CAPACITY]))
        unit = i32(block_idx() * n_warps() + warp_id())
        while unit < n_rows * n_segments:
            row = unit // n_segments
            piece(params, row, (unit - row * n_segments) * LANES + lane_id())
            unit = i32(unit + grid_dim() * n_warps())

    return KernelCall(cfg, launch or LaunchConfig(), BLOCK, lambda weights_types, epilogue_types: fused_silu)


@device_fn
def plain_gate(gate, up):
    """gate * sigmoid(gate) * up"""
    return mul_rn(div_rn(gate, add_rn(f32(1.0), exp(sub_rn(f32(0.0), gate)))), up)


def clamped_gate(limit, alpha):
    """Device function (gate, up): the clamped variant. Comparisons, unlike min and max, pass NaN on."""

    @device_fn
    def gated(gate, up):
        if gate > f32(limit):
            gate = f32(limit)
        if up > f32(limit):
            up = f32(limit)
        if up < f32(-limit):
            up = f32(-limit)
        swish = div_rn(gate, add_rn(f32(1.0), exp(mul_rn(f32(-alpha), gate))))
        return mul_rn(add_rn(up, f32(1.0)), swish)

    return gated


def bf16_rows(intermediate, gated):
    """(chunks of a row, piece): a lane takes 8 columns of a row."""
    n_vectors = intermediate // 8

    @device_fn
    def gated_pair(gate, up):
        return pack_bf16x2(gated(bf16_lo(gate), bf16_lo(up)), gated(bf16_hi(gate), bf16_hi(up)))

    @device_fn
    def piece(params, row, vector):
        if vector < n_vectors:
            at = params[INPUT] + u64(row) * u64(4 * intermediate) + u64(16 * vector)
            g = load16(at)
            u = load16(at + u64(2 * intermediate))
            store16(params[OUTPUT] + u64(row) * u64(2 * intermediate) + u64(16 * vector), gated_pair(g[0], u[0]),
                    gated_pair(g[1], u[1]), gated_pair(g[2], u[2]), gated_pair(g[3], u[3]))

    return n_vectors, piece


def fp8_rows(intermediate, gated):
    """(chunks of a row, piece): a warp takes 4 scales of a row, a lane 16 columns."""
    n_chunks = intermediate // 16

    @device_fn
    def gated4(gate_lo, gate_hi, up_lo, up_hi):
        return (gated(bf16_lo(gate_lo), bf16_lo(up_lo)), gated(bf16_hi(gate_lo), bf16_hi(up_lo)),
                gated(bf16_lo(gate_hi), bf16_lo(up_hi)), gated(bf16_hi(gate_hi), bf16_hi(up_hi)))

    @device_fn
    def absmax4(v, m):
        m = max_f32(max_f32(m, abs_f32(v[0])), abs_f32(v[1]))
        return max_f32(max_f32(m, abs_f32(v[2])), abs_f32(v[3]))

    @device_fn
    def codes4(v, scale):
        return e4m3x4(div_rn(v[0], scale), div_rn(v[1], scale), div_rn(v[2], scale), div_rn(v[3], scale))

    absmax_of_group = over_lanes(maximum, GROUP_LANES)

    @device_fn
    def piece(params, row, chunk):
        # All lanes go on, for the shuffles; past the end they repeat the row's last group and store nothing.
        lane = lane_id()
        at = params[INPUT] + u64(row) * u64(4 * intermediate)
        at = u64(at + u64(32 * min(chunk, n_chunks - GROUP_LANES + lane % GROUP_LANES)))
        g0, g1 = load16(at), load16(at + u64(16))
        u0, u1 = load16(at + u64(2 * intermediate)), load16(at + u64(2 * intermediate + 16))
        a = gated4(g0[0], g0[1], u0[0], u0[1])
        b = gated4(g0[2], g0[3], u0[2], u0[3])
        c = gated4(g1[0], g1[1], u1[0], u1[1])
        d = gated4(g1[2], g1[3], u1[2], u1[3])
        absmax = absmax_of_group(absmax4(d, absmax4(c, absmax4(b, absmax4(a, f32(0.0))))))
        scale = div_rn(max_f32(absmax, f32(1e-4)), f32(448.0))
        if chunk < n_chunks:
            store16(params[OUTPUT] + u64(row) * u64(intermediate) + u64(16 * chunk),
                    codes4(a, scale), codes4(b, scale), codes4(c, scale), codes4(d, scale))
            if lane % GROUP_LANES == 0:
                scale_at = (u64(chunk // GROUP_LANES) * params[CAPACITY] + u64(row)) * u64(4)
                store_f32(params[SCALES] + scale_at, scale)

    return n_chunks, piece
