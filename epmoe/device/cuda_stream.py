"""The handle of the caller's CUDA stream, from any library."""

from epmoe_ref.errors import EPValueError

LEGACY_DEFAULT = 0  # CU_STREAM_LEGACY as a null handle: the default of torch and CuPy


def handle_of(stream) -> int:
    """CUstream as an int, from None (the legacy default stream), a handle, or a stream of torch, CuPy, cuda.core."""
    if stream is None:
        return LEGACY_DEFAULT
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise EPValueError(
        f"stream is a {type(stream).__name__}; give None, a handle (int), or a stream of torch, CuPy or cuda.core"
    )
