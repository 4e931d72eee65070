"""For formats that round: encodes and decodes every token again on its dst_rank, and compares all output arrays.

It uses the same device functions of the format as dispatch. So it checks that the right token's codes and scales are
in the right place, not the encoder's arithmetic.
"""

from functools import lru_cache

from epmoe.device import (
    block_dim,
    block_idx,
    device_fn,
    f32,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load_i32,
    load_u8,
    load_u32,
    load_u64,
    n_warps,
    syncwarp,
    thread_idx,
    u32,
    u64,
    warp_id,
    warp_sum_i32,
)
from epmoe.host.memory_pool import arrange
from epmoe.kernels import formats
from epmoe.kernels.formats import RowPlace
from epmoe.soak import arrays
from epmoe.soak.dispatch_checks import finder
from epmoe.soak.errors import ENCODED, record

THREADS = 256
TILE_ROWS = 128


@lru_cache
def kernels(cfg):
    """{name: kernel} in launch order."""
    made = {"groups": groups_kernel(cfg), "again": again_kernel(cfg)}
    return made | {f"compare {i}": compare_kernel(cfg, i) for i in range(len(formats.of(cfg).output_fields))}


def groups_kernel(cfg):
    """Kernel (params, round, my_rank), a warp for each group: starts of its scale tiles, zeros after its rows."""
    block, fmt = arrays.parameter_block(cfg), formats.of(cfg)
    p_again = block.offset(arrays.AGAIN)
    p_counts, p_starts = block.offset("counts"), block.offset("starts")
    begin_group, finish_group = fmt.begin_group, fmt.finish_group
    ranks, local = cfg.n_ranks, cfg.n_local_experts

    rows_of, tiles_before = _rows_and_tiles(cfg)

    @kernel(max_threads=THREADS)
    def groups(params, number, my_rank):
        counts = load_u64(params + u64(p_counts))
        starts, lane = load_u64(params + u64(p_starts)), i32(lane_id())
        group = i32(warp_id() * grid_dim() + block_idx())
        while group < local:
            tiles = tiles_before(counts, group, lane)
            start = i32(load_i32(starts + u64(4) * u64(group * ranks)))
            if lane == 0:
                begin_group(params + u64(p_again), group, start, tiles)
            finish_group(params + u64(p_again), rows_of(counts, group), tiles, lane)
            group = i32(group + n_warps() * grid_dim())

    return groups


def _rows_and_tiles(cfg):
    """Device functions: rows of a group; 128-row tiles of the groups before it, computed by a whole warp."""
    ranks = cfg.n_ranks

    @device_fn
    def rows_of(counts, expert):
        n, r = i32(0), i32(0)
        while r < ranks:
            n = i32(n + load_i32(counts + u64(4) * u64(expert * ranks + r)))
            r = i32(r + 1)
        return n

    @device_fn
    def tiles_before(counts, group, lane):
        tiles, before = i32(0), i32(lane)
        while before < group:
            tiles = i32(tiles + (rows_of(counts, before) + TILE_ROWS - 1) // TILE_ROWS)
            before = i32(before + 32)
        return i32(warp_sum_i32(tiles))

    return rows_of, tiles_before


def again_kernel(cfg):
    """Kernel (params, round, my_rank): encodes and decodes every row's token into the soak's own arrays."""
    block, fmt, segment_of = arrays.parameter_block(cfg), formats.of(cfg), finder(cfg)
    p_again = block.offset(arrays.AGAIN)
    p_counts, p_starts = block.offset("counts"), block.offset("starts")
    p_tokens, p_payloads = block.offset("tokens"), block.offset("payloads")
    encode, decode = fmt.encode_part, fmt.decode
    token_size, row_bytes = fmt.token_size, 2 * cfg.hidden
    ranks, n_segments = cfg.n_ranks, cfg.n_local_experts * cfg.n_ranks
    _, tiles_before = _rows_and_tiles(cfg)

    @kernel(max_threads=THREADS)
    def again(params, number, my_rank):
        counts = load_u64(params + u64(p_counts))
        starts, lane = load_u64(params + u64(p_starts)), i32(lane_id())
        n_rows = i32(load_i32(starts + u64(4 * n_segments)))
        row = i32(warp_id() * grid_dim() + block_idx())
        while row < n_rows:
            i = i32(segment_of(starts, row))
            is_padding = row - load_i32(starts + u64(4) * u64(i)) >= load_i32(counts + u64(4) * u64(i))
            if not is_padding:
                group = i32(i // ranks)
                start = i32(load_i32(starts + u64(4) * u64(group * ranks)))
                payload = u64(load_u64(params + u64(p_payloads)) + u64(row) * u64(token_size))
                encode(u64(load_u64(params + u64(p_tokens)) + u64(row) * u64(row_bytes)), payload, f32(1), 0, 1, lane)
                syncwarp()  # all lanes have written the payload before any lane reads it
                place = RowPlace(row, group, i32(row - start), tiles_before(counts, group, lane))
                decode(payload, params + u64(p_again), place, 0, 1, lane)
            row = i32(row + n_warps() * grid_dim())

    return again


def compare_kernel(cfg, index):
    """Kernel (params, round, my_rank): compares every byte of one output array of dispatch with the soak's own."""
    block, (_, results) = arrays.parameter_block(cfg), arrays.shapes(cfg)
    name = formats.of(cfg).output_fields[index]
    p_theirs, p_ours = block.offset(name), block.offset(f"{arrays.AGAIN} {name}")
    p_errors = block.offset("errors")
    nbytes = arrange({name: results[name]})[0][name].nbytes
    step, load = (4, load_u32) if nbytes % 4 == 0 else (1, load_u8)

    @kernel(max_threads=THREADS)
    def compare(params, number, my_rank):
        theirs, ours = load_u64(params + u64(p_theirs)), load_u64(params + u64(p_ours))
        i = i32(block_idx() * block_dim() + thread_idx())
        while i < nbytes // step:
            expected = u32(load(ours + u64(step) * u64(i)))
            seen = u32(load(theirs + u64(step) * u64(i)))
            if expected != seen:
                record(
                    load_u64(params + u64(p_errors)), number, i32(ENCODED), i32(index), i32(i * step), expected, seen
                )
            i = i32(i + grid_dim() * block_dim())

    return compare
