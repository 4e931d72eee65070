"""Missing results, and results of another form, are reported in terms of the implementation's interface."""

import numpy as np
import pytest

import epmoe_ref
from epmoe.check import Implementation, check, compare_dispatched, compare_dispatched_world
from epmoe.check.adapters.kernels import PlainKernels
from epmoe.check.adapters.reference import Reference, ReferenceHybrid, ReferenceRows
from epmoe_ref.errors import EPValueError


class Form(Implementation):
    def dispatch(self, input_tokens, topk_ids):
        return self.formed([vars(d).copy() for d in epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids)])

    def combine(self, expert_outputs, dispatched, router_weights):
        return None


def none(results):
    return None


def too_few(results):
    return results[:1]


def one_dict(results):
    return results[0]


def other_names(results):
    return [{"tokens": r["output_tokens"]} for r in results]


def tokens_none(results):
    return [r | {"output_tokens": None} for r in results]


def narrow(name):
    def formed(results):
        return [r | {name: r[name][:, :-1]} for r in results]

    return formed


def widened(name, dtype):
    def formed(results):
        return [r | {name: r[name].astype(dtype)} for r in results]

    return formed


def right(results):
    return results


@pytest.mark.parametrize(
    ("formed", "words"),
    [
        (none, "dispatch returned None; a list over the 2 ranks is needed, of dicts or objects with output_tokens"),
        (too_few, "dispatch returned 1 result; a list over the 2 ranks"),
        (one_dict, "dispatch returned a dict; a list over the 2 ranks"),
        (other_names, "rank 0: dispatch's result has no output_tokens, row_offsets, src_info; it has tokens"),
        (tokens_none, "rank 0: dispatch's result has None for output_tokens"),
        (narrow("output_tokens"), "rank 0: output_tokens is bfloat16 (26, 127), reference bfloat16 (26, 128)"),
        (narrow("src_info"), "rank 0: src_info is int32 (26, 1), reference int32 (26, 2)"),
        (right, "combine returned None; a list over the 2 ranks is needed, of arrays [num_tokens, hidden]"),
    ],
)
def test_the_form_is_named(formed, words):
    implementation = type("Formed", (Form,), {"formed": staticmethod(formed)})
    text = str(check(implementation, n_ranks=2, only="uneven"))
    assert words in text
    assert "raised" not in text
    assert "likely cause" not in text


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("src_info", "int64", "src_info is int64 (26, 2), reference int32 (26, 2)\n      rule: src_info holds int32"),
        (
            "output_tokens",
            "float32",
            "(26, 128)\n      rule: output_tokens holds bfloat16, or its bits as unsigned integers",
        ),
    ],
)
def test_another_element_type_is_all_that_is_said(name, dtype, words):
    """Regression: values of another type were once matched against mistakes that nobody had made."""
    implementation = type("Formed", (Form,), {"formed": staticmethod(widened(name, dtype))})
    report = check(implementation, n_ranks=2, only="tokens")
    assert len(report.failed) == 2
    assert "likely cause" not in str(report)
    assert words in str(check(implementation, n_ranks=2, only="uneven"))


def test_a_rank_that_there_is_not_is_refused_and_no_list_is_a_difference():
    cfg = epmoe_ref.EPConfig(2, 4, 2, 8, 4)
    want = epmoe_ref.dispatch(cfg, [np.zeros((1, 8), "bfloat16")] * 2, [np.zeros((1, 2), np.int32) + [0, 3]] * 2)
    assert "a list over the 2 ranks" in str(compare_dispatched_world(cfg, None, want)[0])
    with pytest.raises(EPValueError, match="rank=5 must be"):
        compare_dispatched(cfg, 5, want[0], want[0])


def test_a_method_that_is_missing_is_named_before_anything_runs():
    class Half(Implementation):
        def combine(self, expert_outputs, dispatched, router_weights):
            return []

    with pytest.raises(EPValueError, match=r"Half has no method dispatch\(self, input_tokens, topk_ids"):
        check(Half)


FORMS = {
    "one row short": lambda a: a[:-1],
    "empty": lambda a: a[:0],
    "one column short": lambda a: a[..., :-1],
    "of no dimension": lambda a: a.reshape(-1)[0],
    "of one more dimension": lambda a: a[None],
    "of float64": lambda a: a.astype(np.float64),
    "of booleans": lambda a: a.astype(bool),
    "a ragged list": lambda a: [[1, 2], [3]],
    "a string": lambda a: "abc",
}
PAIRS = "output_tokens", "row_offsets", "src_info", "recv_count", "expert_ids", "output_scales"


def reshaped(base, function, at, change):
    """An implementation that changes one of its results, or the field `at` of it, on all ranks."""

    def changed(result):
        if isinstance(at, str):
            return [vars(r) | {at: change(getattr(r, at))} for r in result]
        if isinstance(result, list):
            return [change(r) for r in result]
        return tuple([change(r) for r in of] if i == at and of is not None else of for i, of in enumerate(result))

    def method(self, *arguments, **options):
        return changed(getattr(base, function)(self, *arguments, **options))

    return type("Reshaped", (base,), {function: method})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("base", "function", "at", "case"),
    [
        *((Reference, "dispatch", name, "fp8_blockwise") for name in PAIRS),
        (Reference, "dispatch", "output_scales", "nvfp4"),
        (Reference, "dispatch", "scales_offset", "nvfp4"),
        (Reference, "combine", None, "a hot expert"),
        *((ReferenceRows, "dispatch", i, "a hot expert") for i in range(4)),
        (ReferenceRows, "combine", None, "a hot expert"),
        *((ReferenceRows, "dispatch_backward", i, "a hot expert") for i in range(2)),
        (ReferenceRows, "combine_backward", None, "a hot expert"),
        *((ReferenceHybrid, "dispatch", i, "fp8") for i in range(4)),
        (ReferenceHybrid, "combine", None, "fp8"),
        *((ReferenceHybrid, "dispatch_backward", i, "fp8") for i in range(2)),
        (ReferenceHybrid, "combine_backward", None, "fp8"),
    ],
)
def test_a_result_of_any_form_is_compared_and_gets_no_cause(base, function, at, case, form):
    text = str(check(reshaped(base, function, at, FORMS[form]), n_ranks=2, only=case))
    assert text.startswith("DIFFERS") and "raised" not in text, text
    causes = [line for line in text.splitlines() if "likely cause: " in line]
    assert all("leading 0" in c or "not t" in c or "are summed" in c for c in causes), text


def test_sums_of_another_type_or_shape_get_a_remedy():
    for change, words in (
        (lambda a: a.astype(np.float32), ".astype(ml_dtypes.bfloat16)"),
        (lambda a: a.astype(np.float16), "output is float16 (8, 128), reference bfloat16 (8, 128)"),
        (lambda a: a.reshape(-1), "combine returns [num_tokens, hidden]"),
    ):
        changed = reshaped(Reference, "combine", None, change)
        assert words in str(check(changed, n_ranks=2, only="one slot"))


def test_scales_are_needed_and_types_of_ml_dtypes_are_no_bits():
    for name, change, words in (
        ("output_scales", none, "dispatch's result has None for output_scales"),
        ("output_tokens", lambda a: a.view("float8_e4m3fnuz"), "is float8_e4m3fnuz (20, 384), reference float8_e4m3fn"),
    ):
        assert words in str(check(reshaped(Reference, "dispatch", name, change), n_ranks=2, only="fp8_blockwise"))


def without_the_last(results):
    return results[:-1]


@pytest.mark.parametrize(
    ("base", "function", "form", "words"),
    [
        (ReferenceRows, "dispatch", without_the_last, "dispatch returned 4 results; 5 results are"),
        (ReferenceRows, "combine", none, "combine returned None; a list over the 2 ranks"),
        (ReferenceRows, "dispatch_backward", none, "dispatch_backward returned None; 2 results"),
        (ReferenceHybrid, "dispatch", str, 'dispatch returned "(['),
        (ReferenceHybrid, "combine_backward", too_few, "returned 1 result; a list over the 2"),
        (PlainKernels, "buffers", list, "buffers returned 4 results; a dict {name of a buffer"),
        (PlainKernels, "buffers", lambda b: {n: a[:1] for n, a in b.items()}, "returned 1 result;"),
        (PlainKernels, "counters", too_few, "counters returned 1 result; a list over the 2 ranks"),
        (Reference, "make", none, "make returned None; an object of Formed is needed"),
        (ReferenceRows, "make", none, "make returned None; an object of Formed is needed"),
    ],
)
def test_what_a_call_returns_is_named(base, function, form, words):
    def method(self, *arguments, **options):
        return form(getattr(super(Formed, self), function)(*arguments, **options))

    Formed = type("Formed", (base,), {})
    setattr(Formed, function, classmethod(method) if function == "make" else method)
    text = str(check(Formed, n_ranks=2, only="one slot" if base is not ReferenceHybrid else "fp8"))
    assert words in text and "raised" not in text, text
