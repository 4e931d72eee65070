"""Missing results, and results of another form, are reported in terms of the implementation's interface."""

import pytest

import epmoe_ref
from epmoe.check import Implementation, check
from epmoe_ref.errors import EPValueError


class Form(Implementation):
    def dispatch(self, input_tokens, topk_ids):
        return self.formed(
            [vars(d).copy() for d in epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids)]
        )

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
        (
            none,
            "dispatch returned None; a list over the 2 ranks is needed, of dicts or objects with output_tokens",
        ),
        (too_few, "dispatch returned 1 results; a list over the 2 ranks"),
        (one_dict, "dispatch returned a dict; a list over the 2 ranks"),
        (
            other_names,
            "rank 0: dispatch's result has no output_tokens, row_offsets, src_info; it has tokens",
        ),
        (
            narrow("output_tokens"),
            "rank 0: output_tokens is bfloat16 (26, 127), reference bfloat16 (26, 128)",
        ),
        (narrow("src_info"), "rank 0: src_info is int32 (26, 1), reference int32 (26, 2)"),
        (
            right,
            "combine returned None; a list over the 2 ranks is needed, of arrays [num_tokens, hidden]",
        ),
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
        (
            "src_info",
            "int64",
            "src_info is int64 (26, 2), reference int32 (26, 2)\n      rule: src_info holds int32",
        ),
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


def test_a_method_that_is_missing_is_named_before_anything_runs():
    class Half(Implementation):
        def combine(self, expert_outputs, dispatched, router_weights):
            return []

    with pytest.raises(
        EPValueError, match=r"Half has no method dispatch\(self, input_tokens, topk_ids"
    ):
        check(Half)
