"""Functions of the caller on a GPU: what they return is told by the compiler; an output lambda stores as elsewhere."""

from pathlib import Path

import numpy as np
import pytest
from test_functions_of_the_caller import arrays, store
from worlds_at_hand import batch, config, parallel

import epmoe_ref

RIGHT = {"epilogue right", "epilogue whole", "elementwise_lambda_fn store"}


@pytest.fixture(scope="module")
def said(gpu_side):
    """{case: "" or why the GPU's compiler refuses it}; needs no GPU."""
    return gpu_side(Path(__file__).parent / "functions_compiled.py")


def test_functions_that_return_what_they_must_are_taken(said):
    assert {case for case, error in said.items() if not error} == RIGHT


def test_other_functions_are_refused_by_name_before_a_launch(said):
    for case in set(said) - RIGHT:
        what, name = case.removesuffix(", read-only").split()
        assert said[case].startswith(f"{what} {name} "), said[case]


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_an_output_lambda_stores_what_the_reference_stores(fused, where):
    from numba import cuda

    cfg = config(n_ranks=2, n_experts=8, top_k=4, hidden=512, max_tokens_per_rank=40)
    x, ids, weights = batch(cfg, 3, [40, 17])
    bias = np.linspace(-1, 1, 512, dtype=np.float32)
    wanted, d_ref = arrays(x, 512), epmoe_ref.dispatch(cfg, x, ids)
    y = [d.output_tokens for d in d_ref]
    options = dict(elementwise_lambda_fn=store, epilogue_args=(wanted[0], bias, wanted[1]))
    epmoe_ref.combine(cfg, y, d_ref, router_weights=weights, **options)
    with parallel(cfg, fused=fused) as ep:
        for _ in range(2):
            given = arrays(x, 512)
            if where == "device":
                given = [[cuda.to_device(a) for a in of_ranks] for of_ranks in given]
            d = ep.dispatch(x, ids)
            options["epilogue_args"] = given[0], bias, given[1]
            done = ep.combine([a.output_tokens for a in d], d, weights, **options)
            ep.check()
            assert done == [None, None]
            for got, want in zip((*given[0], *given[1]), (*wanted[0], *wanted[1])):
                assert np.array_equal(got if where == "host" else got.copy_to_host(), want)
