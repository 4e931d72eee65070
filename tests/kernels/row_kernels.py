"""Kernels that run one format's device functions alone: a warp a row, a warp a group; and their host side."""

import numpy as np

from epmoe import device
from epmoe.device import (
    block_idx,
    grid_dim,
    i32,
    kernel,
    lane_id,
    load_f32,
    load_i32,
    load_u32,
    load_u64,
    n_warps,
    store_u32,
    u64,
    warp_id,
)
from epmoe.kernels import formats
from epmoe.kernels.formats import RowPlace

POISON = 0xCD
THREADS = 64 if device.SIM else 512


def encode_kernel(fmt, row_bytes, n_parts=1):
    """A warp a row, whose parts it makes one after another."""
    encode_part, token_size = fmt.encode_part, fmt.token_size

    def encode_rows(params, num_tokens, my_rank):
        src = load_u64(params)
        dst = load_u64(params + u64(8))
        row = i32(block_idx() * n_warps() + warp_id())
        while row < num_tokens:
            of_row, payload = src + u64(row) * u64(row_bytes), dst + u64(row) * u64(token_size)
            scale, part = load_f32(params + u64(16)), i32(0)
            while part < n_parts:
                encode_part(of_row, payload, scale, part, n_parts, lane_id())
                part = i32(part + 1)
            row = i32(row + grid_dim() * n_warps())

    return kernel()(encode_rows)


# Words of the decoder's parameter block: payloads, table of rows, table of groups, then the handler's fields.
ROWS, GROUPS, HANDLER = 8, 16, 24


def begin_kernel(fmt):
    begin_group = fmt.begin_group

    def begin_groups(params, num_tokens, my_rank):
        table = load_u64(params + u64(GROUPS))
        g = i32(block_idx() * n_warps() + warp_id())
        while g < num_tokens:
            entry = table + u64(12 * g)
            if lane_id() == 0:
                begin_group(params + u64(HANDLER), g, load_i32(entry), load_i32(entry + u64(8)))
            g = i32(g + grid_dim() * n_warps())

    return kernel()(begin_groups)


def decode_kernel(fmt, n_groups, n_parts=1):
    """num_tokens counts the payloads; groups are finished by other warps than those that decode their rows."""
    decode, finish_group, token_size = fmt.decode, fmt.finish_group, fmt.token_size

    def decode_rows(params, num_tokens, my_rank):
        out = params + u64(HANDLER)
        groups = load_u64(params + u64(GROUPS))
        i = i32(block_idx() * n_warps() + warp_id())
        while i < num_tokens + n_groups:
            if i < n_groups:
                entry = groups + u64(12 * i)
                finish_group(out, load_i32(entry + u64(4)), load_i32(entry + u64(8)), lane_id())
            else:
                payload = load_u64(params) + u64(i - n_groups) * u64(token_size)
                entry = load_u64(params + u64(ROWS)) + u64(8 * (i - n_groups))
                group, row_in_group = load_i32(entry), load_i32(entry + u64(4))
                group_start = load_i32(groups + u64(12 * group))
                tiles_before = load_i32(groups + u64(12 * group + 8))
                part = i32(0)
                while part < n_parts:
                    decode(
                        payload,
                        out,
                        RowPlace(i32(group_start + row_in_group), group, row_in_group, tiles_before),
                        part,
                        n_parts,
                        lane_id(),
                    )
                    part = i32(part + 1)
            i = i32(i + grid_dim() * n_warps())

    return kernel()(decode_rows)


def words_kernel(word):
    """dst[i] = word(src[i]) on uint32, a thread an element."""

    def map_words(params, num_tokens, my_rank):
        i = i32((block_idx() * n_warps() + warp_id()) * 32 + lane_id())
        while i < num_tokens:
            store_u32(load_u64(params + u64(8)) + u64(4 * i), word(load_u32(load_u64(params) + u64(4 * i))))
            i = i32(i + grid_dim() * n_warps() * 32)

    return kernel()(map_words)


class Bench:
    """One machine, its buffers, and launches that wait."""

    def __init__(self):
        self.machine = device.machine(1, seed=0, racecheck=True)

    def put(self, array, name):
        buffer = self.machine.alloc(max(array.nbytes, 16), name)
        buffer.write(np.ascontiguousarray(array))
        return buffer

    def room(self, nbytes, name):
        buffer = self.machine.alloc(nbytes, name)
        buffer.fill(POISON)
        return buffer

    def run(self, kernel, n, words):
        params = self.put(np.array(words, np.uint64), "params")
        blocks = 3 if device.SIM else self.machine.n_sms
        self.machine.launch(kernel, blocks, THREADS, (params.address, n, 0), stream=self.machine.stream(0))
        self.machine.synchronize()
        params.free()


def encode(cfg, bits, input_scale=1.0, n_parts=1):
    """The payload bytes [n, token_size] that the encoder makes of bf16 patterns [n, hidden], in n_parts."""
    fmt, bench = formats.of(cfg), Bench()
    n = bits.shape[0]
    src, dst = bench.put(bits, "rows"), bench.room(n * fmt.token_size, "payloads")
    scale = int(np.float32(input_scale).view(np.uint32))
    bench.run(encode_kernel(fmt, 2 * cfg.hidden, n_parts), n, [src.address, dst.address, scale])
    return dst.read(np.uint8, (n, fmt.token_size))


def decode(cfg, payloads, rows, groups, capacity, n_parts=1):
    """The output arrays, as bytes, by name; they held POISON before.

    payloads [n, token_size]; rows [n, 2]: group, row in group; groups [n_groups, 3]: start, count, tiles before.
    """
    fmt, bench = formats.of(cfg), Bench()
    shapes = fmt.outputs(cfg, capacity)
    assert tuple(shapes) == fmt.output_fields
    out = {name: bench.room(int(np.prod(shape)) * dtype.itemsize, name) for name, (shape, dtype) in shapes.items()}
    inputs = {"payloads": payloads, "rows": np.int32(rows), "groups": np.int32(groups)}
    tables = [bench.put(array, name) for name, array in inputs.items()]
    words = [b.address for b in tables] + [b.address for b in out.values()] + [capacity]
    bench.run(begin_kernel(fmt), len(groups), words)
    bench.run(decode_kernel(fmt, len(groups), n_parts), len(payloads), words)
    return {
        name: out[name].read(np.uint8, (*shape[:-1], shape[-1] * dtype.itemsize))
        for name, (shape, dtype) in shapes.items()
    }


def map_words(word, values):
    """word (uint32 -> uint32, a device function) of every uint32."""
    bench = Bench()
    src = bench.put(np.asarray(values, np.uint32), "words")
    dst = bench.room(4 * len(values), "results")
    bench.run(words_kernel(word), len(values), [src.address, dst.address])
    return dst.read(np.uint32, len(values))
