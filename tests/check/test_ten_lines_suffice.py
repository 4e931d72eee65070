"""The ten lines in epmoe.check's docstring connect a library whose functions know nothing of epmoe."""

import sys
import textwrap
import types

import ml_dtypes
import numpy as np
from numpy_world import NumpyWorld

import epmoe.check
import epmoe_ref
from epmoe_ref import EPConfig


def library():
    """A module with dispatch(tokens, ids, n_experts) and combine(expert outputs, src_info, weights), as the example assumes."""
    module, state = types.ModuleType("my_library"), {}

    def dispatch(input_tokens, topk_ids, n_experts):
        top_k, hidden = topk_ids[0].shape[1], input_tokens[0].shape[1]
        state["world"] = NumpyWorld(EPConfig(len(topk_ids), n_experts, top_k, hidden, 64))
        state["results"] = state["world"].dispatch(input_tokens, topk_ids)
        return ([r[name] for r in state["results"]] for name in ("output_tokens", "row_offsets", "src_info"))

    def combine(expert_outputs, src_info, router_weights):
        return state["world"].combine(expert_outputs, state["results"], router_weights)

    module.dispatch, module.combine = dispatch, combine
    return module


def example():
    """The class in the docstring, and its number of lines."""
    block = epmoe.check.__doc__.split("# mine.py\n")[1].split("    $ ")[0]
    source = textwrap.dedent("    " + block.lstrip())
    return source, [line for line in source.splitlines() if line.strip()]


def test_the_example_has_ten_lines_or_fewer():
    assert len(example()[1]) <= 10


def test_the_example_runs_and_passes(monkeypatch, each_case_once):
    monkeypatch.setitem(sys.modules, "my_library", library())
    names = {}
    exec(compile(example()[0], "mine.py", "exec"), names)
    report = epmoe.check.check(names["Mine"], n_ranks=2)
    assert report.passed, str(report)
    assert len(report.run) >= 10
    assert "not given and not compared: expert_ids, recv_count" in report.verdict


def test_two_results_can_be_compared_without_running_anything():
    cfg = EPConfig(2, 4, 2, 8, 4)
    tokens = [np.zeros((3, 8), ml_dtypes.bfloat16)] * 2
    ids = [np.array([[0, 1], [2, 3], [1, 2]], np.int32)] * 2
    want = epmoe_ref.dispatch(cfg, tokens, ids)
    assert epmoe.check.compare_dispatched_world(cfg, NumpyWorld(cfg).dispatch(tokens, ids), want) == []
    assert epmoe.check.report([]) == "no difference"
