"""All legal combinations of options in the simulator: kernels = reference = record model, to the bit.

formats x {split, fused} x shared expert x {a2a, skip_a2a} x {weights array, function, none} x {epilogue, none}.

    python tests/oracle/option_matrix.py [--jobs 2] [--seed 0] [--only nvfp4,fused]
"""

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import api_arrays
import numpy as np
import record_model
from differences import combine_difference
from exact_formats import FACTS
from random_worlds import Limits, describe, random_world
from reference_runs import reference_difference
from simulator_runs import Different, combine_arguments, one_round

FORMATS = (*FACTS, "mxfp4_rows/slots")  # the last with fuse_a_scale_preshuffle
LIMITS = Limits(ranks=3, local_experts=3, top_k=3, hidden=1, tokens=6, large_share=0, work=2000)


@dataclass(frozen=True)
class Case:
    token_format: str
    launches: str  # "split" or "fused"
    shared_expert: bool
    skip_a2a: bool
    weights: str  # "array", "function" or "none"
    epilogue: bool

    @property
    def legal(self):
        """Whether the options go together: a shared expert and an epilogue need the weighted sum."""
        return self.weights != "none" or not (self.shared_expert or self.epilogue)

    def __str__(self):
        return "-".join(
            [
                self.token_format,
                self.launches,
                "skip_a2a" if self.skip_a2a else "a2a",
                f"weights_{self.weights}",
                *(["shared"] if self.shared_expert else []),
                *(["epilogue"] if self.epilogue else []),
            ]
        )


def all_cases():
    return [
        Case(*options)
        for options in itertools.product(
            FORMATS, ("split", "fused"), (False, True), (False, True), ("array", "function", "none"), (False, True)
        )
    ]


def legal_cases():
    return [case for case in all_cases() if case.legal]


def world_of(case, seed):
    """A small world with the options of the case; combine_dtype comes from the seed."""
    name, _, layout = case.token_format.partition("/")
    for attempt in itertools.count():
        world = random_world(
            zlib.crc32(f"{seed} {case} {attempt}".encode()),
            LIMITS,
            token_format=name,
            fuse_a_scale_preshuffle=bool(layout),
            fused_shared_expert=case.shared_expert,
            skip_a2a=case.skip_a2a,
            weights="none" if case.weights == "none" else "array",
            epilogue=case.epilogue,
        )
        if sum(len(t) for t in world.tokens) >= 4:
            return world


def difference_of(case, seed=0, kernels=None):
    """First difference between kernels, reference and record model in a world of this case; None when there is none."""
    import epmoe_ref
    from epmoe import ExpertParallel, LocalWorld

    world = world_of(case, seed)
    as_function = case.weights == "function"
    difference = reference_difference(world, weights_as_function=as_function)
    if difference:
        return f"reference: {difference}"

    cfg = api_arrays.config(world, epmoe_ref.EPConfig)
    received, expected = record_model.dispatch(world), record_model.combine(world)
    try:
        with ExpertParallel(cfg, LocalWorld(world.n_ranks, seed=seed), kernels=kernels) as ep:
            dispatched, combined = one_round(ep, world, case.launches == "fused", as_function, received)
    except Different as e:
        return f"kernels against the record model: {e}\n  {describe(world)}"
    reference = epmoe_ref.dispatch(
        cfg, api_arrays.input_tokens(world), api_arrays.topk_ids(world), input_scale=api_arrays.input_scale(world)
    )
    weights, keywords = combine_arguments(world, as_function)
    outputs = [api_arrays.expert_outputs(world, r, received[r], reference[r]) for r in range(world.n_ranks)]
    in_numpy = epmoe_ref.combine(cfg, outputs, reference, router_weights=weights, **keywords)
    for rank in range(world.n_ranks):
        difference = combine_difference(world, rank, expected[rank], combined[rank])
        if difference:
            return f"kernels against the record model: {difference}\n  {describe(world)}"
        difference = _unequal_arrays(world, received[rank], epmoe_ref.canonical(dispatched[rank]), reference[rank])
        difference = difference or combine_difference(
            world, rank, in_numpy[rank].view(api_arrays.BIT_TYPES[world.combine_dtype]).tolist(), combined[rank]
        )
        if difference:
            return f"kernels against the reference, rank {rank}: {difference}\n  {describe(world)}"
    return None


def _unequal_arrays(world, received, kernel, reference):
    """Array by array, after canonical; bytes that are undefined on the device are copied from the reference."""
    data = np.array([record.src_rank != record_model.PADDING for record in received.rows], bool)
    for field in fields(reference):
        mine, theirs = getattr(reference, field.name), getattr(kernel, field.name)
        if isinstance(mine, int):
            if mine != theirs:
                return f"{field.name} is {theirs}, the reference has {mine}"
            continue
        if mine is None or theirs is None:
            if mine is not theirs:
                return f"{field.name} is {type(theirs).__name__}, the reference has {type(mine).__name__}"
            continue
        if mine.shape != theirs.shape:
            return f"{field.name} has shape {theirs.shape}, the reference {mine.shape}"
        if field.name == "output_tokens":
            mine, theirs = mine[data], theirs[data]
        if field.name == "output_scales" and world.token_format == "fp8_blockwise":
            mine, theirs = mine[:, data], theirs[:, data]
        a, b = api_arrays.bytes_of(mine), api_arrays.bytes_of(theirs)
        if field.name == "output_scales" and world.fuse_a_scale_preshuffle:
            defined = sorted(received.scale_bytes)
            a, b = a[defined], b[defined]
        if field.name == "recv_count":
            a, b = mine.ravel().astype(np.int64), theirs.ravel().astype(np.int64)
        if not np.array_equal(a, b):
            at = int(np.flatnonzero(a != b)[0])
            return f"{field.name}: byte {at} is {b[at]}, the reference has {a[at]}"
    return None


def _run(task):
    case, seed, kernels = task
    try:
        return case, difference_of(case, seed, kernels)
    except Exception as e:  # a crash must name its case and let the others run
        return case, f"{type(e).__name__}: {e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--seed", type=int, default=0, help="of the worlds and of the simulator's schedule")
    parser.add_argument("--kernels", choices=("plain", "fast"), default="plain")
    parser.add_argument("--only", default="", help="run cases whose name has all of these comma-separated words")
    args = parser.parse_args()
    words = [w for w in args.only.split(",") if w]
    cases = [c for c in legal_cases() if all(w in str(c).split("-") for w in words)]
    if not cases:
        parser.error(f"--only {args.only} leaves no case; a name looks like {legal_cases()[0]}")
    began, failures = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        tasks = [(case, args.seed, args.kernels) for case in cases]
        for done, (case, difference) in enumerate(pool.imap_unordered(_run, tasks), 1):
            if difference:
                failures += 1
                print(f"\nFAIL {case}: {difference}", flush=True)
            print(
                f"\r{done}/{len(cases)} cases, {failures} failed, {time.monotonic() - began:.0f} s", end="", flush=True
            )
    print(f"\n{'FAIL' if failures else 'PASS'}: seed {args.seed}, {len(cases)} legal combinations of options")
    return 1 if failures else 0


if __name__ == "__main__":
    # inherited by the processes, before epmoe.device is imported
    os.environ.setdefault("EPMOE_DEVICE", "sim")
    sys.path[:0] = [str(Path(__file__).parents[2])]
    sys.exit(main())
