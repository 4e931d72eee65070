"""A Dispatched can be copied, pickled and printed; what combine relies on is read-only, or a change of it is told."""

import copy
import pickle

import numpy as np
import pytest
from worlds_at_hand import batch, config, parallel

from epmoe import EPValueError
from epmoe.host.arrays import to_numpy
from epmoe.host.dispatched import ARRAYS


@pytest.fixture
def opened():
    cfg = config(token_format="mxfp8", hidden=128)
    x, ids, weights = batch(cfg)
    with parallel(cfg) as ep:
        d = ep.dispatch(x, ids)
        y = [np.ones((one.n_rows, 128), x[0].dtype) for one in d]

        def combine(given):
            return ep.combine(y, given, weights)

        yield d, combine, ep, (x, ids, weights, y)


def same_values(a, b):
    for name in ARRAYS:
        one, other = to_numpy(getattr(a, name)), to_numpy(getattr(b, name))
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and one.tobytes() == other.tobytes()), name
    assert (a.num_tokens, a.rank, a.cfg, a.n_rows) == (b.num_tokens, b.rank, b.cfg, b.n_rows)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_is_as_good_as_the_original_for_combine(opened, how):
    d, combine, ep, (x, ids, weights, y) = opened
    copies = [how(one) for one in d]
    for one, other in zip(d, copies):
        same_values(one, other)
        assert np.shares_memory(one.output_tokens, other.output_tokens) == (how is copy.copy)
    got = [a.tobytes() for a in combine(copies)]
    again = ep.dispatch(x, ids)
    assert got == [a.tobytes() for a in ep.combine(y, again, weights)]


def test_a_pickle_holds_the_values_and_is_of_no_round(opened):
    d, combine, *_ = opened
    back = pickle.loads(pickle.dumps(d))
    for one, other in zip(d, back):
        same_values(one, other)
    with pytest.raises(EPValueError, match="of another round"):
        combine(back)
    combine(d)


def test_printing_shows_the_exact_rows(opened):
    d, *_ = opened
    said = repr(d[0])
    assert f"rank=0, num_tokens={d[0].num_tokens}, n_rows={d[0].n_rows}" in said
    assert repr(d[0].trimmed().src_info) in said and len(d[0].src_info) > d[0].n_rows


@pytest.mark.parametrize("name", ["src_info", "topk_ids", "row_offsets"])
def test_what_combine_relies_on_is_read_only(opened, name):
    d, combine, *_ = opened
    array = getattr(d[0], name)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
    combine(d)


@pytest.mark.parametrize("name", ["src_info", "topk_ids"])
def test_a_changed_copy_is_told_and_the_round_goes_on(opened, name):
    d, combine, *_ = opened
    changed = [copy.deepcopy(one) for one in d]
    getattr(changed[1], name)[0] += 1
    says = f"{name} of the Dispatched of rank 1 was changed: row 0 is"
    with pytest.raises(EPValueError, match=says):
        combine(changed)
    setattr(changed[1], name, getattr(changed[1], name)[:, :1])
    with pytest.raises(EPValueError, match=f"{name} of the Dispatched of rank 1 is int32"):
        combine(changed)
    combine(d)


def test_rows_that_are_sorted_anew_are_told(opened):
    d, combine, *_ = opened
    changed = [one.trimmed() for one in d]
    changed[0].src_info = changed[0].src_info[::-1].copy()
    with pytest.raises(EPValueError, match="src_info of the Dispatched of rank 0 was changed"):
        combine(changed)


def test_what_an_earlier_dispatch_returned_may_be_written_again(opened):
    d, combine, ep, (x, ids, weights, y) = opened
    combine(d)
    again = ep.dispatch(x, ids, out=d)
    for one, other in zip(again, d):
        assert np.shares_memory(one.src_info, other.src_info)
        assert np.array_equal(one.row_offsets, other.row_offsets)
    combine(again)
