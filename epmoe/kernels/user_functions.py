"""The caller's own functions inside a kernel: epilogue and router weights, with their arguments out of the block.

A function is plain Python: scalars come as numbers, arrays as something to index with [i] or [i, j]. On the GPU it is
compiled; in the simulator it runs as it is.
"""

from epmoe.device import SIM, device_fn, f32, i32, load_f32, load_i32, load_u64, u64

LOADS = {"float32": load_f32, "int32": load_i32}


def reader(types, offset):
    """Device function params -> tuple of the arguments of these (dtype, number of axes), from `offset` bytes on."""
    if not types:
        @device_fn
        def nothing(params):
            return ()

        return nothing
    (dtype, n_axes), *others = types
    head = _scalar(dtype, offset) if n_axes == 0 else _array(dtype, n_axes, offset)
    tail = reader(others, offset + 8 * (1 + n_axes))

    @device_fn
    def arguments(params):
        return (head(params),) + tail(params)

    return arguments


def words_of(types) -> int:
    """Words of the parameter block that arguments of these types take."""
    return sum(1 + n_axes for _, n_axes in types)


def compiled(fn):
    """The caller's function as a device function that takes its arguments as one tuple and returns float32."""
    inner = device_fn(fn)

    @device_fn
    def call(a, b, args):
        return f32(inner(a, b, *args))

    return call


def compiled_epilogue(fn):
    """As `compiled`, for (token, col, value, *args)."""
    inner = device_fn(fn)

    @device_fn
    def call(token, col, value, args):
        return f32(inner(token, col, value, *args))

    return call


def _scalar(dtype, offset):
    load, cast = LOADS[dtype], f32 if dtype == "float32" else i32

    @device_fn
    def read(params):
        return cast(load(params + u64(offset)))

    return read


def _array(dtype, n_axes, offset):
    if SIM:
        def read(params):
            words = [load_u64(params + offset + 8 * i) for i in range(1 + n_axes)]
            return SimulatedArray(LOADS[dtype], words[0], words[1:])

        return read
    from .gpu_array import array_at

    view = array_at(dtype, n_axes)
    if n_axes == 1:
        @device_fn
        def read_vector(params):
            return view(u64(load_u64(params + u64(offset))), u64(load_u64(params + u64(offset + 8))))

        return read_vector

    @device_fn
    def read_matrix(params):
        return view(u64(load_u64(params + u64(offset))), u64(load_u64(params + u64(offset + 8))),
                    u64(load_u64(params + u64(offset + 16))))

    return read_matrix


class SimulatedArray:
    """An array in the simulator's memory, read element by element."""

    def __init__(self, load, address, shape):
        self.load, self.address, self.shape = load, address, tuple(shape)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise IndexError(f"an array of shape {self.shape} takes {len(self.shape)} indices, not {len(index)}")
        place = 0
        for i, n in zip(index, self.shape):
            if not -n <= i < n:
                raise IndexError(f"index {i} is outside an axis of length {n}")
            place = place * n + int(i) % n
        return self.load(self.address + 4 * place)
