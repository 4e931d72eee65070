"""One run of a SwiGLU world: the kernel of swiglu.py alone, on rows of ordinary and of unusual numbers."""

from importlib import import_module

import ml_dtypes
import numpy as np

from epmoe import device
from epmoe.kernels import LaunchConfig, Wanted
from epmoe.mutants.errors import WrongResult
from epmoe.mutants.world_run import new_buffer
from epmoe_ref.config import EPConfig
from epmoe_ref.swiglu import fused_silu, fused_silu_fp8

BF16 = np.dtype(ml_dtypes.bfloat16)
ODD = (np.nan, np.inf, -np.inf, -0.0, 30.0, -30.0, 7.0, 6e4)
SPARE = 3  # rows after the last group


def rows(n, width):
    """Rows [n, 2 width] bf16: ordinary ones, some with unusual numbers, and one of tiny numbers."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, 2 * width)) * 2.0 ** rng.integers(-4, 5, (n, 2 * width))
    x[1::2] = np.where(rng.random(x[1::2].shape) < 0.05, rng.choice(ODD, x[1::2].shape), x[1::2])
    x[2] *= 2.0**-30
    return x.astype(BF16)


class SwigluRun:
    """One run. go() raises any error of the simulator or the check."""

    def __init__(self, world, kernels, seed, *, racecheck=True, **simulation):
        self.world, self.kernels = world, kernels
        self.machine = device.machine(1, seed=seed, racecheck=racecheck, n_sms=8, **simulation)
        self.buffers = []

    def go(self):
        """Run the kernel. Raises the error that notices the edit."""
        world = self.world
        cfg = EPConfig(1, len(world.groups) - world.shared, 1, 8, 1, fused_shared_expert=world.shared)
        offsets = np.cumsum([0, *world.groups]).astype(np.int32)
        n, options = int(offsets[-1]), dict(limit=world.limit) if world.limit else {}
        x = rows(n + SPARE, world.width)
        kind = "fp8_blockwise" if world.fp8 else "bf16"
        make = import_module(f"{self.kernels.__name__}.swiglu").fused_silu_kernel
        call = make(cfg, LaunchConfig(*world.shape), intermediate=world.width, output_format=kind, **options)
        try:
            out = self._new("output", (n + SPARE, world.width), np.uint8 if world.fp8 else np.int16)
            scales = self._new("scales", (max(1, world.width // 128), n + SPARE), np.float32)
            given = [self._new(name, a.shape, a.dtype) for name, a in (("input", x), ("row_offsets", offsets))]
            for (buffer, *_), a in zip(given, (x, offsets)):
                buffer.write(a)
            before = [self._read(a) for a in (out, scales)]
            launch = call.prepared(Wanted(0, 0, self.machine, self.machine.stream(0), {}))
            launch.start(*(array[0].address for array in (*given, out, scales)), n + SPARE)
            self.machine.synchronize()
            with np.errstate(all="ignore"):
                self._check(x, offsets, n, options, [self._read(a) for a in (out, scales)], before)
        finally:
            call.close()
            for buffer in self.buffers:
                buffer.free()

    def _new(self, name, shape, dtype):
        self.buffers.append(new_buffer(self.machine, name, 0, shape, dtype))
        return self.buffers[-1], shape, dtype

    def _read(self, array):
        buffer, shape, dtype = array
        return buffer.read(dtype, shape)

    def _check(self, x, offsets, n, options, got, before):
        codes, scales = got
        type_ = ml_dtypes.float8_e4m3fn if self.world.fp8 else BF16
        if self.world.fp8:
            want, want_scales = fused_silu_fp8(x, offsets, **options)
            wrong = ~np.isclose(scales[:, :n], want_scales[:, :n], rtol=1e-5, equal_nan=True)
            self._expect(~wrong, "scale")
            self._expect(scales[:, n:] == before[1][:, n:], "scale after the last row")
        else:
            want = fused_silu(x, offsets, **options)
        value, wanted = codes[:n].view(type_).astype(np.float32), want[:n].astype(np.float32)
        bits = np.asarray(want[:n]).view(codes.dtype)
        near = abs(codes[:n].astype(np.int64) - bits.astype(np.int64)) <= 1
        self._expect(np.where(np.isnan(wanted), np.isnan(value), near & ~np.isnan(value)), "element")
        self._expect(codes[n:] == before[0][n:], "element after the last row")

    def _expect(self, right, what):
        if not right.all():
            raise WrongResult(f"{self.world.name}: {what} {np.argwhere(~right)[0].tolist()} is not the reference's")
