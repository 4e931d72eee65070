"""Division by numbers that only a launch knows: of unsigned 32-bit words, where // of int32 divides 64-bit ones."""

from epmoe.device import device_fn, i32, u32


@device_fn
def divided(a, b):
    """a // b of int32 numbers, a not negative and b positive."""
    return i32(u32(a) // u32(b))
