"""Vectors of the expert-grouped layout: the first round of every case of epmoe.check at 4 ranks."""

from dataclasses import asdict
from functools import partial

import numpy as np

from epmoe.check.cases import cases, epilogue_args
from epmoe.check.experts import Round
from epmoe.vectors.files import Array, file_name, one_nan

N_RANKS = 4
FIELDS = ("output_tokens", "output_scales", "scales_offset", "row_offsets", "expert_ids", "src_info", "recv_count")


def vectors():
    """(name, about, function that makes the arrays) of every vector."""
    for case in cases(N_RANKS):
        yield file_name("dispatch_combine", case.name), _about(case), partial(_arrays, case)


def _about(case):
    return {
        "case": case.name,
        "n_tokens": list(case.n_tokens),
        "config": asdict(case.cfg),
        "weighted": case.weighted,
        "epilogue": "value * scale + bias, float32" if case.epilogue else None,
        "order": "rows of a segment in (token, slot) order; an implementation may use any order",
    }


def _arrays(case):
    round_ = Round(case, 0, range(N_RANKS), None)
    want, (outputs, combined) = round_.dispatched_want, round_.reference_combine()
    combined = one_nan(combined)
    arrays = []
    for rank in range(N_RANKS):
        arrays += [
            Array("input_tokens", "input", rank, round_.input_tokens[rank]),
            Array("topk_ids", "input", rank, round_.topk_ids[rank]),
        ]
        if case.input_scale is not None:
            arrays.append(Array("input_scale", "input", rank, np.array([case.input_scale[rank]], np.float32)))
        arrays += [
            Array(name, "output", rank, getattr(want[rank], name))
            for name in FIELDS
            if getattr(want[rank], name) is not None
        ]
        arrays.append(Array("expert_outputs", "expert", rank, outputs[rank]))
        if case.weighted:
            arrays.append(Array("router_weights", "input", rank, round_.router_weights[rank]))
        if case.epilogue:
            scale, bias = (a[rank] for a in epilogue_args(N_RANKS))
            arrays.append(Array("epilogue_args", "input", rank, np.array([scale, bias])))
        arrays.append(Array("combined", "output", rank, combined[rank]))
    return arrays
