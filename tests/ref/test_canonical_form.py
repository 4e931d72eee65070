"""canonical: every order inside the segments gives the same form, and no other change does."""

import copy

import numpy as np
import pytest
from small_worlds import FORMAT_IDS, FORMATS, as_bytes, assert_same, config, every_option, world

from epmoe_ref import Dispatched, canonical, dispatch, segments
from epmoe_ref.formats.scale_layout import layout_of


def shuffled(d, rng):
    """The same result after another order of atomics: rows permuted inside each segment."""
    d = copy.deepcopy(d)
    for s in segments(d):
        order = rng.permutation(s.end - s.start)
        d.output_tokens[s.start : s.end] = d.output_tokens[s.start : s.end][order]
        d.src_info[s.start : s.end] = d.src_info[s.start : s.end][order]
        if d.output_scales is not None:
            first = s.start - int(d.row_offsets[s.group])
            rows, columns = layout_of(d.output_scales)(
                d.output_scales.shape,
                d.row_offsets,
                d.scales_offset,
                s.group,
                np.arange(first, first + s.end - s.start),
            )
            flat = d.output_scales.reshape(-1)
            flat[rows[:, None] + columns] = flat[rows[order, None] + columns]
    return d


@pytest.mark.parametrize("name, slots, hidden", FORMATS, ids=FORMAT_IDS)
def test_order_inside_segments_does_not_matter(name, slots, hidden):
    rng = np.random.default_rng(1)
    for cfg in every_option(name, slots, hidden):
        for d in dispatch(cfg, *world(cfg, hot=5)):
            other = shuffled(d, rng)
            assert not np.array_equal(other.src_info, d.src_info)
            assert_same(canonical(other), d)  # the reference's own result is in canonical form


def test_a_row_in_a_wrong_segment_is_still_seen():
    cfg = config()
    d = dispatch(cfg, *world(cfg))[1]
    first, second = list(segments(d))[:2]
    swap = [first.start, second.start]
    for array in (d.output_tokens, d.src_info):
        array[swap] = array[swap[::-1]]
    with pytest.raises(AssertionError):
        assert_same(canonical(d), dispatch(cfg, *world(cfg))[1])


def test_rows_of_a_token_stay_with_their_payload():
    cfg = config()
    d = shuffled(dispatch(cfg, *world(cfg))[0], np.random.default_rng(2))
    before = {
        (s.local_expert, s.src_rank, *map(int, d.src_info[i])): as_bytes(d.output_tokens[i]).tobytes()
        for s in segments(d)
        for i in range(s.start, s.end)
    }
    c = canonical(d)
    for s in segments(c):
        for i in range(s.start, s.end):
            key = (s.local_expert, s.src_rank, *map(int, c.src_info[i]))
            assert as_bytes(c.output_tokens[i]).tobytes() == before[key]


def test_the_argument_is_left_alone_and_arrays_with_spare_rows_are_taken():
    cfg = config("fp8_blockwise", False, 128, fused_shared_expert=True)
    d = dispatch(cfg, *world(cfg))[2]
    spare = Dispatched(**vars(d))
    spare.output_tokens = np.concatenate([d.output_tokens, d.output_tokens[:7]])
    spare.src_info = np.concatenate([d.src_info, np.full((7, 2), 9, np.int32)])
    spare.output_scales = np.concatenate([d.output_scales, d.output_scales[:, :7]], axis=1)
    mixed = shuffled(spare, np.random.default_rng(3))
    before = mixed.src_info.copy()
    got = canonical(mixed)
    assert np.array_equal(mixed.src_info, before) and not np.shares_memory(got.src_info, mixed.src_info)
    assert_same(got, spare)
