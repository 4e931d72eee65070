"""EPConfig: derived values, and every refusal with value, rule and remedy."""

import pickle

import numpy as np
import pytest

from epmoe_ref import EPConfig, EPError, EPValueError, format_of

SIZES = dict(n_ranks=4, n_experts=16, top_k=4, hidden=512, max_tokens_per_rank=32)


def test_defaults():
    cfg = EPConfig(4, 16, 4, 512, 32)
    assert (cfg.p2p_world_size, cfg.token_format, cfg.alignment, cfg.combine_dtype) == (4, "bf16", 16, "bf16")
    assert not (cfg.fuse_a_scale_preshuffle or cfg.fused_shared_expert or cfg.skip_a2a or cfg.use_shmem)
    assert (cfg.allreduce_world_size, cfg.n_worlds, cfg.combine_itemsize) == (1, 1, 2)


def test_owner_and_local_expert_split_the_global_id():
    cfg = EPConfig(**SIZES)
    ids = np.arange(16)
    assert cfg.n_local_experts == cfg.n_groups == 4
    assert np.array_equal(cfg.owner(ids) * cfg.n_local_experts + cfg.local_expert(ids), ids)
    assert cfg.owner(ids).max() == 3 and cfg.owner(7) == 1 and cfg.local_expert(7) == 3


def test_p2p_worlds_are_consecutive_ranks():
    cfg = EPConfig(**{**SIZES, "n_ranks": 16}, use_shmem=True)
    assert (cfg.p2p_world_size, cfg.n_worlds) == (8, 2)
    assert [(cfg.world(r), cfg.world_rank(r)) for r in (0, 7, 8, 15)] == [(0, 0), (0, 7), (1, 0), (1, 7)]


def test_groups_and_source_ranks_follow_the_options():
    cfg = EPConfig(**SIZES, fused_shared_expert=True, skip_a2a=True, allreduce_world_size=4)
    assert (cfg.n_groups, cfg.n_src_ranks) == (5, 1)
    assert EPConfig(**SIZES).n_src_ranks == 4


def test_equal_configurations_are_one_key_and_travel_between_processes():
    a = EPConfig(**SIZES)
    b = EPConfig(**{name: np.int64(value) for name, value in SIZES.items()}, p2p_world_size=4)
    assert a == b and hash(a) == hash(b) and type(b.hidden) is int
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.hidden = 8


def test_the_format_is_made_on_demand():
    cfg = EPConfig(**SIZES, token_format="nvfp4")
    assert cfg.format.kind == format_of(cfg).kind == "nvfp4" and cfg.format.hid_dim == 512


def test_limits_of_kernels_are_not_limits_of_the_configuration():
    EPConfig(**{**SIZES, "n_ranks": 16, "n_experts": 64, "top_k": 40}, p2p_world_size=16)
    EPConfig(**SIZES, skip_a2a=True, use_shmem=True)


def test_the_shared_expert_is_shared_by_a_multiple_or_a_divisor_of_all_ranks():
    options = dict(fused_shared_expert=True, skip_a2a=True)
    assert EPConfig(**SIZES, **options).allreduce_world_size == 4
    for world in (1, 2, 4, 8, 12):
        assert EPConfig(**SIZES, **options, allreduce_world_size=world).allreduce_world_size == world


def test_allreduce_world_size_is_ignored_where_it_has_no_meaning():
    EPConfig(**SIZES, allreduce_world_size=3)
    EPConfig(**SIZES, allreduce_world_size=3, skip_a2a=True)


@pytest.mark.parametrize(
    "changes, words",
    [
        *[
            ({name: bad}, f"{name}={bad}.*at least 1")
            for name in [*SIZES, "p2p_world_size", "alignment", "allreduce_world_size"]
            for bad in (0, -3)
        ],
        ({"n_experts": 16.0}, "n_experts=16.0 must be a whole number"),
        ({"n_ranks": True}, "n_ranks=True must be a whole number"),
        ({"top_k": None}, "top_k=None must be a whole number"),
        ({"max_tokens_per_rank": 2**31}, "max_tokens_per_rank=2147483648 must be at most 2147483647"),
        ({"max_tokens_per_rank": 2**28}, "max_tokens_per_rank=268435456 lets one rank receive 4294967312 rows.*lower"),
        ({"n_experts": 10}, "n_experts=10 must be a multiple of n_ranks=4"),
        ({"n_experts": 65536}, "n_experts=65536 must be at most 65535"),
        ({"top_k": 17}, "top_k=17 must be at most n_experts=16"),
        ({"p2p_world_size": 3}, "p2p_world_size=3 must divide n_ranks=4"),
        ({"p2p_world_size": 2}, "p2p_world_size=2 is smaller than n_ranks=4.*use_shmem=True"),
        ({"n_ranks": 16}, "p2p_world_size=8 is smaller than n_ranks=16.*use_shmem=True.*kernels take at most 8"),
        ({"n_ranks": 12, "n_experts": 24}, r"n_ranks=12: .*at most 8 ranks.*lower n_ranks, or .*\[1, 2, 3, 4, 6\]"),
        ({"token_format": "fp8"}, "token_format='fp8' must be one of bf16, fp8_blockwise"),
        ({"token_format": None}, "token_format=None must be a name"),
        ({"hidden": 12}, "hidden=12 must be a multiple of 8 for token_format='bf16'.*pad"),
        ({"hidden": 192, "token_format": "fp8_blockwise"}, "hidden=192 must be a multiple of 128"),
        ({"hidden": 96, "token_format": "nvfp4"}, "hidden=96 must be a multiple of 64"),
        ({"hidden": 192, "token_format": "mxfp4"}, "hidden=192 must be a multiple of 128"),
        ({"hidden": 192, "token_format": "mxfp8"}, "hidden=192 must be a multiple of 128"),
        ({"hidden": 48, "token_format": "mxfp4_rows"}, "hidden=48 must be a multiple of 32"),
        (
            {"hidden": 128, "token_format": "mxfp4_rows", "fuse_a_scale_preshuffle": True},
            "hidden=128 .* multiple of 256",
        ),
        ({"fuse_a_scale_preshuffle": True}, "only for token_format='mxfp4_rows'"),
        ({"fuse_a_scale_preshuffle": "yes"}, "fuse_a_scale_preshuffle='yes' must be True or False"),
        ({"alignment": 8}, "alignment=8 must be a power of two of at least 16"),
        ({"alignment": 48}, "alignment=48 must be a power of two"),
        ({"combine_dtype": "fp8"}, "combine_dtype='fp8' must be one of bf16, fp16, fp32"),
        (
            {"skip_a2a": True, "fused_shared_expert": True, "allreduce_world_size": 6},
            "allreduce_world_size=6 must be a multiple or a divisor of n_ranks=4",
        ),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(EPValueError, match=words) as error:
        EPConfig(**{**SIZES, **changes})
    assert isinstance(error.value, EPError) and isinstance(error.value, ValueError)
