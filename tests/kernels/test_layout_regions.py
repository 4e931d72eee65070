"""The layout: nothing overlaps, peers find each other's regions, counters are where their page says."""

import numpy as np
import pytest

from epmoe import layout
from epmoe_ref import EPConfig, EPLocalSyncCounters

CONFIGS = [
    EPConfig(4, 256, 8, 7168, 128),
    EPConfig(1, 1, 1, 8, 1),
    EPConfig(3, 21, 5, 24, 11, alignment=64),
    EPConfig(8, 64, 32, 128, 3, token_format="fp8_blockwise", combine_dtype="fp32", fused_shared_expert=True),
    EPConfig(4, 12, 3, 64, 9, token_format="nvfp4", skip_a2a=True, p2p_world_size=2),
    EPConfig(4, 12, 3, 64, 9, p2p_world_size=2, use_shmem=True),
]


def bytes_covered(spans, size):
    """Asserts that the (offset, nbytes) lie apart from each other and inside `size`; their sum."""
    end = 0
    for offset, nbytes in sorted(spans):
        assert offset >= end and nbytes > 0
        end = offset + nbytes
    assert end <= size
    return sum(nbytes for _, nbytes in spans)


@pytest.mark.parametrize("cfg", CONFIGS)
def test_no_byte_belongs_to_two_regions(cfg):
    regions = layout.regions(cfg)
    bytes_covered([(r.offset, r.nbytes) for r in regions], layout.total_bytes(cfg))
    for r in regions:
        assert r.offset % layout.REGION_ALIGNMENT == 0
        assert r.nbytes == np.prod(r.shape, dtype=np.int64) * r.dtype.itemsize
        assert len(r.index_names) == len(r.shape)


@pytest.mark.parametrize("cfg", CONFIGS)
def test_no_counter_word_belongs_to_two_regions(cfg):
    inside = layout.counter_regions(cfg)
    size = layout.region(cfg, "ep_counters").nbytes
    used = bytes_covered([(r.offset, r.nbytes) for r in inside], size)
    if not cfg.skip_a2a:  # only C has words that no one uses
        assert size - used == 4 * (cfg.n_experts - cfg.n_local_experts)


@pytest.mark.parametrize("cfg", CONFIGS)
def test_what_peers_write_comes_first(cfg):
    names = [r.name for r in layout.regions(cfg)]
    assert names[:4] == ["dispatch_recv_buf", "dispatch_recv_count", "combine_recv_buf", "combine_recv_count"]
    assert ("combine_send_buf" in names) == cfg.use_shmem


@pytest.mark.parametrize("cfg", CONFIGS)
def test_every_word_in_use_has_a_name_for_reports(cfg):
    named = layout.named_words(cfg)
    spans = [
        (offset, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize) for _, offset, shape, dtype, _ in named
    ]
    in_counters = layout.region(cfg, "ep_counters").nbytes
    in_counters -= sum(r.nbytes for r in layout.counter_regions(cfg))
    assert bytes_covered(spans, layout.total_bytes(cfg)) == sum(r.nbytes for r in layout.regions(cfg)) - in_counters


@pytest.mark.parametrize("cfg", CONFIGS)
def test_counter_regions_start_where_the_counters_class_says(cfg):
    counters = EPLocalSyncCounters[cfg.n_experts]
    starts = {name: offset for name, (offset, _) in counters.regions().items()}
    starts["combine_ready"] = starts.pop("combine_wait")
    assert {r.name: r.offset // 4 for r in layout.counter_regions(cfg)} == starts
    assert layout.region(cfg, "ep_counters").shape == (counters.total_size(),)


def test_counter_regions_by_hand():
    at = {r.name: r.offset // 4 for r in layout.counter_regions(EPConfig(2, 6, 2, 8, 4))}
    assert at == dict(
        reserved=0, finished=6, rank_completion=12, A=20, B=32, C=38, D=44, E=45, F=46, G=47, combine_ready=48
    )


def test_message_by_hand():
    assert layout.message(EPConfig(2, 8, 8, 24, 4)) == (48, 48, 64, 80)
    assert layout.message(EPConfig(2, 16, 9, 24, 4)) == (48, 48, 64, 96)
    assert layout.message(EPConfig(2, 6, 2, 24, 4, alignment=64)) == (64, 64, 128, 192)
    assert layout.combine_msg_bytes(EPConfig(2, 6, 2, 24, 4, combine_dtype="fp32")) == 96
