"""SwiGLU between the two matrix products of the experts, for rows whose number only the device knows.

A row of the input holds gate and up: its two halves. The kernels read the number of rows from row_offsets in device
memory, so dispatch, experts and combine can be enqueued without the host waiting for the counts in between. Float32
inside, one rounding at the end. exp is not exactly rounded: results agree with the reference within one bf16 ulp
(FP8: one code), and are no part of the bit-exact promise.
"""

from epmoe.device import (abs_f32, add_rn, block_idx, device_fn, div_rn, exp, f32, grid_dim, i32, kernel, lane_id,
                          load16, load_i32, max_f32, mul_rn, n_warps, store16, store_f32, sub_rn, u64, warp_id)
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPValueError

from . import elements
from .bits import over_lanes
from .formats.number_codes import e4m3x4
from .formats.row_copy import store_vector
from .formats.row_encoder import maximum
from .launch import KernelCall, LaunchConfig
from .params import LANES, ParameterBlock, in_turn, tuple_of

VALUES = elements.make("bf16")
GROUP = 128                 # elements that share a scale, in FP8 output
GROUP_LANES = 8             # 16 elements each: one 16-byte store of e4m3
MULTIPLE = {"bf16": 8, "fp8_blockwise": GROUP}
BLOCK = ParameterBlock(("input_tokens", 1), ("row_offsets", 1), ("output_tokens", 1), ("output_scales", 1),
                       ("capacity", 1))
INPUT, OFFSETS, OUTPUT = BLOCK.index("input_tokens"), BLOCK.index("row_offsets"), BLOCK.index("output_tokens")
SCALES, CAPACITY = BLOCK.index("output_scales"), BLOCK.index("capacity")


def fused_silu_kernel(cfg: EPConfig, launch: LaunchConfig | None = None, *, intermediate: int,
                      output_format: str = "bf16", limit: float | None = None, alpha: float = 1.702) -> KernelCall:
    """Makes a kernel that turns rows [capacity, 2 intermediate] bf16 into rows [capacity, intermediate] bf16 or e4m3.

    It is started with the words of BLOCK. Rows [0, row_offsets[n_groups]) are written, padding between groups included
    (what comes out of unspecified rows is unspecified). output_scales: with e4m3 output, float32 [intermediate / 128,
    capacity], transposed, rows as in the input. The padded row_offsets of an fp8_blockwise dispatch give this layout.

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
    if limit is not None and not (limit > 0 and abs(alpha) < float("inf")):
        raise EPValueError(f"limit={limit} must be positive, or None for the plain variant, and alpha={alpha} finite")
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


def _of_eight(gated):
    """Device function (gate, up): applies `gated` to two vectors of 8 bf16 -> 8 float32 values."""
    gated_values = tuple_of(8, lambda j: device_fn(lambda gate, up: gated(gate[j], up[j])))
    return device_fn(lambda gate, up: gated_values(VALUES.unpack(gate), VALUES.unpack(up)))


def bf16_rows(intermediate, gated):
    """(chunks of a row, piece): a lane takes 8 columns of a row."""
    n_vectors, gated8 = intermediate // 8, _of_eight(gated)

    @device_fn
    def piece(params, row, vector):
        if vector < n_vectors:
            at = params[INPUT] + u64(row) * u64(4 * intermediate) + u64(16 * vector)
            g, u = load16(at), load16(at + u64(2 * intermediate))
            store_vector(params[OUTPUT] + u64(row) * u64(2 * intermediate) + u64(16 * vector), VALUES.pack(gated8(g, u)))

    return n_vectors, piece


def fp8_rows(intermediate, gated):
    """(chunks of a row, piece): a warp takes 4 scales of a row, a lane 16 columns."""
    n_chunks, gated8 = intermediate // 16, _of_eight(gated)
    absmax8 = in_turn(8, lambda j: device_fn(lambda m, v: max_f32(m, abs_f32(v[j]))))
    divided8 = tuple_of(8, lambda j: device_fn(lambda v, scale: div_rn(v[j], scale)))
    absmax_of_group = over_lanes(maximum, GROUP_LANES)

    @device_fn
    def piece(params, row, chunk):
        # All lanes go on, for the shuffles; past the end they repeat the row's last group and store nothing.
        lane = lane_id()
        at = params[INPUT] + u64(row) * u64(4 * intermediate)
        at = u64(at + u64(32 * min(chunk, n_chunks - GROUP_LANES + lane % GROUP_LANES)))
        g0, g1 = load16(at), load16(at + u64(16))
        u0, u1 = load16(at + u64(2 * intermediate)), load16(at + u64(2 * intermediate + 16))
        a, b = gated8(g0, u0), gated8(g1, u1)
        absmax = absmax_of_group(absmax8(absmax8(f32(0.0), a), b))
        scale = div_rn(max_f32(absmax, f32(1e-4)), f32(448.0))
        if chunk < n_chunks:
            a, b = divided8(a, scale), divided8(b, scale)
            store16(params[OUTPUT] + u64(row) * u64(intermediate) + u64(16 * chunk), e4m3x4(a[0], a[1], a[2], a[3]),
                    e4m3x4(a[4], a[5], a[6], a[7]), e4m3x4(b[0], b[1], b[2], b[3]), e4m3x4(b[4], b[5], b[6], b[7]))
            if lane % GROUP_LANES == 0:
                scale_at = (u64(chunk // GROUP_LANES) * params[CAPACITY] + u64(row)) * u64(4)
                store_f32(params[SCALES] + scale_at, scale)

    return n_chunks, piece
