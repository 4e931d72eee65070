"""The plain kernels on a GPU (-m gpu): all ranks share it, their kernels resident together; against the reference."""

import numpy as np
import pytest
from plain_world import PlainWorld
from rounds import run_round
from test_combine_options import CFG, functions_agree, made, output_lambda_stores, scaled_bias, table_weight
from test_rounds import BY_PLAIN_KERNELS, CASES

from epmoe import device
from epmoe.kernels import LaunchConfig, plain
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import PeerTimeout

pytestmark = pytest.mark.gpu
LAUNCH = LaunchConfig(n_sms=16, num_threads=256)
ALL_CASES = CASES | BY_PLAIN_KERNELS
TWO = dict(n_ranks=2, n_experts=4, top_k=2, max_tokens_per_rank=4)


def rounds(cfg, counts, *, fused=True, n=2, **options):
    world, rng = PlainWorld(cfg, fused=fused, launch=LAUNCH), np.random.default_rng(0)
    for _ in range(n):
        run_round(world, rng, counts, **options)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("name", [name for name in ALL_CASES if "p2p worlds" not in name])
def test_rounds_are_exact_and_need_no_host_reset(name, fused):
    cfg, tokens, options = ALL_CASES[name]
    rounds(cfg, tokens, fused=fused, **options)


def test_a_typical_decode_and_a_hundred_rounds():
    rounds(EPConfig(n_ranks=2, n_experts=64, top_k=8, hidden=7168, max_tokens_per_rank=128), [128, 97])
    rounds(EPConfig(n_ranks=2, n_experts=16, top_k=4, hidden=256, max_tokens_per_rank=40), [40, 33], n=100)


def test_user_functions_with_arguments():
    functions_agree(made("plain", CFG, table_weight, scaled_bias, launch=LAUNCH))
    output_lambda_stores(launch=LAUNCH)


def test_a_peer_that_never_comes_is_named_in_time():
    world = PlainWorld(EPConfig(**TWO, hidden=8), launch=LAUNCH, timeout_s=0.2)
    world.dispatch([np.zeros((2, 8), "bfloat16")] * 2, [np.array([[0, 1]] * 2)] * 2, ranks=[0])
    with pytest.raises(PeerTimeout, match="no signal from src_rank 1"):
        world.raise_if_failed(0)


@pytest.mark.parametrize("older", [(7, 5), (8, 0)], ids=["sm_75", "sm_80"])
@pytest.mark.parametrize("token_format, hidden", [("bf16", 64), ("fp8_blockwise", 128), ("nvfp4", 64), ("mxfp8", 128)])
def test_ptx_made_for_older_devices_gives_the_same_bits(monkeypatch, older, token_format, hidden):
    from numba.cuda.codegen import CUDACodeLibrary

    from epmoe.device import kernel_cache

    made = CUDACodeLibrary.get_asm_strs
    targets = []

    def for_older(self, cc=None):
        texts = made(self, older)
        targets.extend(line for text in texts for line in text.splitlines() if line.startswith(".target"))
        return texts

    monkeypatch.setattr(CUDACodeLibrary, "get_asm_strs", for_older)
    # what it keeps is of this device
    monkeypatch.setattr(kernel_cache, "find_or_make", lambda key, make: make())
    rounds(EPConfig(**TWO, hidden=hidden, token_format=token_format), [4, 3])
    assert targets and all("sm_%d%d" % older in line for line in targets), targets


def test_grids_that_cannot_be_resident_are_refused_and_the_default_is_not():
    cfg = EPConfig(**TWO, hidden=8)
    kernel, machine = plain.dispatch_kernel(cfg, num_threads=1024), device.machine(1)
    assert 1 <= kernel.grid(machine) <= 2 * machine.n_sms


def test_no_kernel_spills_much_and_all_fit_1024_threads():
    from epmoe.device.gpu_driver import check, cu

    cfg, machine = EPConfig(n_ranks=8, n_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128), device.machine(1)
    for name in (n for n in plain.__all__ if n.endswith("_kernel")):
        kernel = getattr(plain, name)(cfg)
        function = machine.prepare(kernel.kernel.of(kernel._compiled_for({}))).function
        registers, local = (
            check(cu.cuFuncGetAttribute(getattr(cu.CUfunction_attribute, which), function))
            for which in ("CU_FUNC_ATTRIBUTE_NUM_REGS", "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
        )
        assert registers <= 64 and local <= 512, (name, registers, local)
