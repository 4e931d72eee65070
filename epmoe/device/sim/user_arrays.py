"""Arrays and words that simulated kernels make from an address. On a GPU: gpu_user_arrays and tuple_or_memory."""

from .intrinsics import INTRINSICS


def array_at(dtype: str, n_axes: int, writable: bool):
    """Function (address, length of each axis) -> array, for the caller's own functions."""
    del n_axes  # the lengths say how many
    short = {"float32": "f32", "int32": "i32"}[dtype]
    load, store, number = (INTRINSICS[name] for name in (f"load_{short}", f"store_{short}", short))

    def write(address, value):
        if not writable:
            raise TypeError("the array is read-only")
        store(address, number(value))

    return lambda address, *shape: SimulatedArray(load, write, address, shape)


class SimulatedArray:
    """An array in the simulator's memory, read and written element by element."""

    def __init__(self, load, store, address, shape):
        self.load, self.store, self.address, self.shape = load, store, address, shape

    def __getitem__(self, index):
        return self.load(self._place(index))

    def __setitem__(self, index, value):
        self.store(self._place(index), value)

    def _place(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise IndexError(f"an array of shape {self.shape} takes {len(self.shape)} indices, not {len(index)}")
        place = 0
        for i, n in zip(index, self.shape):
            if not -n <= i < n:
                raise IndexError(f"index {i} is outside an axis of length {n}")
            place = place * n + int(i) % n
        return self.address + 4 * place


def output(i: int):
    """Function (out) -> uint64: entry i of a tuple of uint64, or of the words at the address `out`."""
    return lambda out: out[i] if isinstance(out, tuple) else INTRINSICS["load_u64"](out + 8 * i)
