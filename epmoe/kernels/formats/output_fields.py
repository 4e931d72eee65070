"""Where a format's output arrays are: `output(i)` reads entry i of `out`, array i's address or the capacity in rows.

`out` is a tuple of uint64, or the address of such words in device memory.
"""

from epmoe.device import SIM, load_u64

if SIM:

    def output(i: int):
        """Device function (out) -> uint64."""

        def entry(out):
            return out[i] if isinstance(out, tuple) else load_u64(out + 8 * i)

        return entry
else:
    from epmoe.device.tuple_or_memory import output

__all__ = ["output"]
