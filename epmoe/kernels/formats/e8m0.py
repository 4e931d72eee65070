"""e8m0, the power-of-two scale of the MX formats: a byte b means 2**(b - 127), and 0xFF means NaN."""

from epmoe.device import device_fn, f32_as_u32, u32, u32_as_f32

NAN_BITS = 0x7FC00000
BITS_OF_2_TO_MINUS_127 = 0x00400000     # float32 subnormal


@device_fn
def e8m0_round_up(v):
    """float32 -> byte (u32): the least power of two that is not below |v|; 2**127 is the largest; NaN, Inf -> 0xFF."""
    magnitude = u32(f32_as_u32(v) & u32(0x7FFFFFFF))
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    byte = u32(u32(magnitude + u32(0x7FFFFF)) >> u32(23))
    if magnitude <= u32(BITS_OF_2_TO_MINUS_127):
        byte = u32(0)
    if magnitude > u32(0x7F000000):
        byte = u32(0xFE)
    if magnitude >= u32(0x7F800000):
        byte = u32(0xFF)
    return byte


@device_fn
def e8m0_reciprocal(byte):
    """1 / 2**(byte - 127) as float32, exact for every byte, NaN for 0xFF."""
    bits = u32(u32(u32(254) - byte) << u32(23))
    if byte == u32(254):
        bits = u32(BITS_OF_2_TO_MINUS_127)
    if byte == u32(255):
        bits = u32(NAN_BITS)
    return u32_as_f32(bits)
