"""What fused_a2a refuses on the device: before anything is launched, with value, rule and remedy."""

import numpy as np
import pytest
from rows_group import BF16, FP32, group_of, routing, tokens

from epmoe import fused_a2a
from epmoe_ref.errors import EPValueError


class Calls:
    """Good calls of two ranks of two experts, whose arguments a test changes by name."""

    def __init__(self):
        self.group, self.rng = group_of(2), np.random.default_rng(1)
        self.ids, self.probs = routing(self.rng, (4, 3), 4, 2)
        self.x, self.maps = tokens(self.rng, (4, 3), 8), [np.ones((n, 4), bool) for n in (4, 3)]
        self.handle, self.hybrid = self.dispatch()[-1], self.by_expert(pad_multiple=4)[-1]

    def dispatch(self, **changed):
        given = dict(x=self.x, token_indices=self.ids, token_probs=self.probs, num_experts=4)
        return fused_a2a.fused_dispatch(**given | dict(group=self.group) | changed)

    def combine(self, **changed):
        given = dict(x=self.rows_of(self.handle), group=self.group, handle=self.handle)
        return fused_a2a.fused_combine(**given | changed)

    def by_expert(self, **changed):
        given = dict(x=self.x, routing_map=self.maps, probs=None, num_local_experts=2)
        return fused_a2a.hybrid_ep_dispatch(**given | dict(group=self.group) | changed)

    def sums(self, **changed):
        given = dict(x=self.rows_of(self.hybrid), handle=self.hybrid)
        return fused_a2a.hybrid_ep_combine(**given | changed)

    def init(self, seq_len=4, num_local_experts=2, fp8_dispatch=False):
        sizes = 8, seq_len, num_local_experts, 24, 24, fp8_dispatch
        fused_a2a.init_hybrid_ep_buffer(self.group, *sizes)

    def rows_of(self, handle):
        return tokens(self.rng, handle.num_rows, 8)


@pytest.fixture(scope="module")
def calls():
    made = Calls()
    yield made
    for good in (made.dispatch, made.combine, made.by_expert, made.sums):
        good()  # the calls that were refused harmed none


def at(arrays, rank, place, value):
    copies = [a.copy() for a in arrays]
    copies[rank][place] = value
    return copies


REFUSED = {
    "an id too large": (
        lambda c: c.dispatch(token_indices=at(c.ids, 1, (2, 0), 4)),
        r"rank 1: token 2, k 0 holds 4, which is outside \[0, num_experts=4\)",
    ),
    "an id twice": (
        lambda c: c.dispatch(token_indices=at(c.ids, 0, 1, 3)),
        r"rank 0: token 1, k 1 holds 3, which k 0 of the token already holds",
    ),
    "float ids": (lambda c: c.dispatch(token_indices=c.probs), "integer type.*convert it to int64"),
    "no number of experts": (lambda c: c.dispatch(num_experts="4"), "whole number, at least 1"),
    "numbers of rows for fewer ranks": (
        lambda c: c.sums(num_permuted_tokens=c.hybrid.num_rows[:1]),
        "num_permuted_tokens has 1 entries; one for each of 2 ranks",
    ),
    "a rank too few": (lambda c: c.dispatch(x=c.x[:1]), "x has 1 entries"),
    "experts that do not divide": (
        lambda c: c.dispatch(num_experts=5),
        "num_experts=5 must be a multiple of n_ranks=2: change one, or add experts that no token selects",
    ),
    "more experts than there can be": (
        lambda c: c.dispatch(num_experts=2**31),
        "num_experts=2147483648 must be at most 65535",
    ),
    "rows of 12 bytes": (lambda c: c.dispatch(x=[a[:, :6] for a in c.x]), "must be a positive multiple of 16"),
    "probs of another type": (
        lambda c: c.dispatch(token_probs=[p.astype(BF16) for p in c.probs]),
        "token_probs of rank 0 has dtype bfloat16",
    ),
    "the flag without its other": (
        lambda c: c.combine(async_finish=False, allocate_on_comm_stream=True),
        "allocate_on_comm_stream=True needs async_finish=True",
    ),
    "rows that are not the handle's": (lambda c: c.combine(x=c.x), "rows, "),
    "another handle": (lambda c: c.combine(handle=c.hybrid), "the handle that fused_dispatch returned"),
    "the handle of another group": (
        lambda c: c.combine(group=group_of(2)),
        r"group is .* over another one, .* pass that one",
    ),
    "no handle": (lambda c: c.sums(handle=None), "that hybrid_ep_dispatch returned is needed"),
    "a map of bytes": (
        lambda c: c.by_expert(routing_map=[m.astype(np.uint8) for m in c.maps]),
        "dtype uint8, bool is needed: convert",
    ),
    "a map of fewer experts": (
        lambda c: c.by_expert(num_local_experts=3),
        "4 columns, 6 are needed: n_ranks=2 times num_local_experts=3",
    ),
    "more local experts than there can be": (lambda c: c.by_expert(num_local_experts=2**30), "must be at most 65535"),
    "bytes in words": (lambda c: fused_a2a.get_buffer(c.group, "x"), "hidden_bytes='x' must be a whole number"),
    "another release's seventh argument": (lambda c: c.init(fp8_dispatch=1), "fp8_dispatch=1 must be True or False"),
    "FP8 of half a group": (lambda c: c.init(fp8_dispatch=True), "hidden_dim=8 must be a multiple of 128"),
    "a format for a flag": (lambda c: c.init(fp8_dispatch="fp8"), "fp8_dispatch='fp8' must be True or False"),
    "a buffer for more tokens than int32 counts": (
        lambda c: c.init(seq_len=2**40),
        "seq_len=1099511627776 must be at most",
    ),
    "a buffer for more experts than there can be": (lambda c: c.init(num_local_experts=2**31), "must be at most 65535"),
    "float32 by expert": (lambda c: c.by_expert(x=[a.astype(FP32) for a in c.x]), "dtype float32"),
    "a negative budget": (lambda c: c.by_expert(num_permuted_tokens=-1), "num_permuted_tokens=-1"),
    "a budget of more rows than int32 counts": (
        lambda c: c.by_expert(num_permuted_tokens=2**40),
        "num_permuted_tokens=1099511627776 must be at most 2147483647",
    ),
    "more padding than int32 counts": (
        lambda c: c.by_expert(pad_multiple=2**31),
        "num_local_experts=2 times pad_multiple=2147483648, rows of padding=4294967296 must be at most",
    ),
    "another padding": (lambda c: c.sums(pad_multiple=8), "the handle has 4"),
    "another number of rows": (lambda c: c.sums(num_permuted_tokens=5), "whose handle has"),
    "half an SM": (lambda c: fused_a2a.set_deepep_num_sms(0.5), "num_sms=0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_and_nothing_was_launched(calls, case):
    call, said = REFUSED[case]
    before = calls.group.machine.count
    with pytest.raises(EPValueError, match=said):
        call(calls)
    assert calls.group.machine.count == before


@pytest.mark.parametrize("dtype, nbytes", [(BF16, 2), (FP32, 4), (np.uint8, 2)], ids=str)
def test_hidden_bytes(dtype, nbytes):
    assert fused_a2a.get_hidden_bytes(np.zeros((3, 24), dtype)) == 24 * nbytes
    assert fused_a2a.get_hidden_bytes([(np.zeros((3, 24), dtype),)]) == 24 * nbytes
    for nothing in [], [()]:
        with pytest.raises(EPValueError, match="no array that can be read"):
            fused_a2a.get_hidden_bytes(nothing)


def test_a_handle_of_rows_by_expert_cannot_be_unpacked(calls):
    with pytest.raises(TypeError, match="not iterable"):
        list(calls.hybrid)
