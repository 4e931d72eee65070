"""LocalWorld on a GPU that all ranks share: rounds equal the reference, device arrays in and out, bad ids there."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest
from test_arrays import WithDlpack
from worlds_at_hand import BF16, batch, combine, config, equal_combine, equal_dispatch, parallel

import epmoe_ref
from epmoe import DeviceArray, EPValueError, LaunchConfig
from epmoe.check import compare_combined_world
from epmoe.host.arrays import view

pytestmark = pytest.mark.gpu

LARGE = dict(n_ranks=4, n_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128)
LIBRARIES = [name for name in ("torch", "cupy") if importlib.util.find_spec(name)]


def on_gpu(array):
    """The array in torch's, else CuPy's, GPU memory."""
    if "torch" in LIBRARIES:
        import torch

        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()
    import cupy

    return cupy.asarray(array)


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize(
    "sizes", [dict(), dict(n_ranks=1, n_experts=8, top_k=8), LARGE], ids=["small", "one rank", "large"]
)
def test_rounds_equal_the_reference(sizes, fused):
    cfg = config(**sizes)
    with parallel(cfg, fused=fused) as ep:
        for number in range(3):
            rng, most = np.random.default_rng(number), cfg.max_tokens_per_rank
            x, ids, weights = batch(cfg, number, list(rng.integers(0, most + 1, cfg.n_ranks)))
            d = ep.dispatch(x, ids)
            assert all(isinstance(a.output_tokens, DeviceArray) for a in d)
            want = equal_dispatch(cfg, d, x, ids)
            equal_combine(cfg, combine(ep, d, weights), want, weights)


@pytest.mark.parametrize("token_format", ["fp8_blockwise", "nvfp4", "mxfp4", "mxfp8", "mxfp4_rows"])
def test_every_format_equals_the_reference(token_format):
    cfg = config(hidden=512, token_format=token_format, max_tokens_per_rank=40, fused_shared_expert=True)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        for scale in (1.0, [0.5, 3.0]):
            d = ep.dispatch(x, ids, input_scale=scale)
            equal_dispatch(cfg, d, x, ids, input_scale=scale)
            ep.combine([np.zeros((ep.capacity, 512), BF16)] * 2, d, weights)
        ep.check()


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_device_arrays_go_in_and_results_into_them(dtype):
    cfg = config(hidden=64, max_tokens_per_rank=9)
    x, ids, weights = batch(cfg)
    if dtype == np.uint8:  # has no -1
        ids = [np.stack([a[:, 0] % 4, (a[:, 0] + 1) % 4], axis=1) for a in ids]
    ids = [a.astype(dtype) for a in ids]
    with parallel(cfg) as ep:
        given = [on_gpu(a) for a in x]
        d = ep.dispatch(given, [on_gpu(a) for a in ids])
        want = equal_dispatch(cfg, d, x, ids)
        into = [on_gpu(np.zeros((len(a), 64), BF16)) for a in x]
        out = combine(ep, d, [on_gpu(w) for w in weights], out=into)
        ep.check()
        assert all(a is b for a, b in zip(out, into))
        equal_combine(cfg, [as_numpy(a) for a in into], want, weights)


def as_numpy(array):
    """What lies in a device array of another library, as NumPy."""
    if hasattr(array, "cpu"):
        import torch

        return array.cpu().view(torch.int16).numpy().view(BF16)
    return array.get()


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_seen_without_a_copy(library):
    cfg = config(hidden=64)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)[0].trimmed()
        if library == "torch":
            import torch

            tokens = torch.from_dlpack(d.output_tokens)
            assert tokens.dtype == torch.bfloat16 and tokens.data_ptr() == d.output_tokens.address
            assert np.array_equal(tokens.float().cpu().numpy(), d.output_tokens.numpy().astype(np.float32))
            assert int(d.row_offsets.numpy()[-1]) == len(tokens)
        else:
            import cupy

            info = cupy.asarray(d.src_info)
            assert info.data.ptr == d.src_info.address and np.array_equal(info.get(), d.src_info.numpy())


@pytest.mark.parametrize("token_format", ["bf16", "fp8_blockwise"])
def test_a_numba_kernel_is_an_expert(token_format):
    """It reads d.output_tokens where they lie, as bf16 or as the codes of FP8, and writes what combine takes."""
    from numba import cuda, float32
    from numba.cuda.bf16 import bfloat16

    @cuda.jit
    def double(x, y):
        row, col = cuda.grid(2)
        y[row, col] = bfloat16(float32(2) * float32(x[row, col]))

    cfg = config(hidden=128, token_format=token_format)
    kind = BF16 if token_format == "bf16" else np.uint8
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d, y = ep.dispatch(x, ids), []
        for of_rank in d:
            rows, offsets = of_rank.output_tokens.numba(), of_rank.row_offsets.numba()
            assert rows.device_ctypes_pointer.value == of_rank.output_tokens.address
            assert np.array_equal(offsets.copy_to_host(), of_rank.row_offsets.numpy())
            assert rows.dtype == kind
            made = cuda.device_array(rows.shape, BF16)
            double[rows.shape[0], (1, 128)](rows, made)
            values, n = of_rank.output_tokens.numpy().view(kind), of_rank.n_rows
            assert np.array_equal(made.copy_to_host()[:n].astype(np.float32), 2 * values[:n].astype(np.float32))
            y.append(made)
        if token_format == "fp8_blockwise":
            scales = d[0].trimmed().output_scales  # transposed, hence strided
            assert np.array_equal(scales.numba().copy_to_host(), scales.numpy())
        want = epmoe_ref.dispatch(cfg, x, ids)
        rows = [a.output_tokens.view(kind) for a in want]
        rows = [(2 * a.astype(np.float32)).astype(BF16) for a in rows]
        expected = epmoe_ref.combine(cfg, rows, want, router_weights=weights)
        out = [a.numpy() for a in ep.combine(y, d, weights)]
        assert not compare_combined_world(cfg, out, expected)


def test_dlpack_alone_is_enough(ep, x, ids):
    tokens = ep.dispatch(x, ids)[0].output_tokens
    seen = view(WithDlpack(tokens), "tokens")
    assert (seen.address, seen.shape) == (tokens.address, tokens.shape)
    assert seen.dtype == BF16 and seen.strides is None


@pytest.mark.parametrize("value", [4, -2, 2**31, 2**40, -(2**40)])
def test_bad_ids_on_the_device_count_as_none_and_are_raised_later(value, ep, x, ids, weights):
    bad = [a.astype(np.int64) for a in ids]
    bad[1][2] = [value, 1]
    clean = [a.copy() for a in bad]
    clean[1][2] = [-1, 1]
    d = ep.dispatch(x, [on_gpu(a) for a in bad])
    with pytest.raises(EPValueError, match=r"rank 1: topk_ids\[2, 0\]"):
        d[0].trimmed()
    want = equal_dispatch(ep.cfg, d, x, clean)
    assert np.array_equal(d[1].topk_ids.numpy(), clean[1])
    equal_combine(ep.cfg, combine(ep, d, weights), want, weights)


@pytest.mark.parametrize("seed", range(5))
def test_random_garbage_ids_on_the_device_write_nothing_out_of_bounds(seed):
    cfg = config(n_ranks=4, n_experts=8, top_k=3, hidden=32, max_tokens_per_rank=16)
    rng = np.random.default_rng(seed)
    garbage = [rng.integers(-3, 12, (16, 3)) if seed % 2 else rng.integers(-(2**31), 2**31, (16, 3)) for _ in range(4)]
    clean = []
    for a in garbage:
        a = np.where((a < 0) | (a >= 8), -1, a)
        repeated = np.array([[a[t, k] in a[t, :k] for k in range(3)] for t in range(16)])
        clean.append(np.where(repeated, -1, a))
    x = [rng.standard_normal((16, 32)).astype(BF16) for _ in range(4)]
    with parallel(cfg) as ep:
        for _ in range(2):
            d = ep.dispatch(x, [on_gpu(a.astype(np.int32)) for a in garbage])
            with pytest.raises(EPValueError, match="treated as -1"):
                ep.check()
            equal_dispatch(cfg, d, x, clean)
            combine(ep, d)


def test_fused_grids_of_all_ranks_must_fit_on_the_gpu():
    cfg = config()
    with parallel(cfg, launch=LaunchConfig(n_sms=100)) as ep:
        with pytest.raises(EPValueError, match="n_sms=100 for each of 2 ranks"):
            ep.dispatch(*batch(cfg)[:2])
    with parallel(cfg, launch=LaunchConfig(n_sms=100), fused=False) as ep:
        d = ep.dispatch(*batch(cfg)[:2])
        equal_dispatch(cfg, d, *batch(cfg)[:2])


def test_scales_cut_along_columns_read_right():
    cfg = config(hidden=256, token_format="fp8_blockwise", max_tokens_per_rank=6)
    x, ids, _ = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)[0]
        cut = d.trimmed().output_scales
        whole = d.output_scales.numpy()
        assert cut.shape == (2, d.n_rows) and np.array_equal(cut.numpy(), whole[:, : d.n_rows], equal_nan=True)
        assert d.output_tokens.dtype == ml_dtypes.float8_e4m3fn


def test_leaving_raises_what_nobody_has_seen(x, ids):
    with pytest.raises(EPValueError, match="treated as -1"):
        with parallel(config()) as ep:
            d = ep.dispatch(x, [on_gpu(np.full_like(a, 99)) for a in ids])
    assert [a.n_rows for a in d] == [0, 0], "results outlive the object"
