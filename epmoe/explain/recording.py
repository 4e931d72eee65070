"""Runs one round of a small world in the simulator, and records every memory operation of its kernels."""

from dataclasses import dataclass

import numpy as np

import epmoe_ref
from epmoe.check import compare_combined, compare_dispatched
from epmoe.device.sim.recorder import Recorder
from epmoe.expert_parallel import ExpertParallel
from epmoe.host.arrays import to_numpy
from epmoe.verify.experts import Experts, reordered
from epmoe.worlds.local import LocalWorld
from epmoe_ref.config import EPConfig

INTERMEDIATE = 16  # width of the experts


@dataclass
class Recording:
    """One round: the recorder's events, and what the kernels made.

    dispatched: over ranks, the kernels' Dispatched (NumPy, exact rows). differences: places where the kernels' results
    differ from the reference's; empty if they are correct.
    """

    cfg: EPConfig
    seed: int
    recorder: Recorder
    dispatched: list
    differences: list

    @property
    def events(self):
        """The recorded events, in order."""
        return self.recorder.events

    @property
    def dispatch_end(self):
        """The last step of dispatch; combine's steps come after it."""
        return self.recorder.runs[1].first_step

    @property
    def end(self):
        """The last step."""
        return self.events[-1].step


def record(cfg, routed, *, fused=False, seed=0):
    """Run one round of dispatch, experts and combine in the simulator, and compare it with the reference."""
    recorder = Recorder()
    experts = Experts(cfg, seed, INTERMEDIATE)
    world = LocalWorld(cfg.n_ranks, seed=seed, recorder=recorder)
    want = epmoe_ref.dispatch(cfg, routed.x, routed.topk_ids)
    with ExpertParallel(cfg, world, fused=fused, kernels="plain") as ep:
        held = ep.dispatch(routed.x, routed.topk_ids)
        dispatched = [d.trimmed().numpy() for d in held]
        differences = [str(e) for r in world.ranks for e in compare_dispatched(cfg, r, dispatched[r], want[r])]
        y_want = [experts(r, d) for r, d in enumerate(want)]
        y = [reordered(cfg, want[r], dispatched[r], y_want[r], rows=len(dispatched[r].src_info)) for r in world.ranks]
        combined = [np.array(to_numpy(out)) for out in ep.combine(y, held, routed.topk_weights)]
    expected = epmoe_ref.combine(cfg, y_want, want, router_weights=routed.topk_weights)
    differences += [
        str(e)
        for r in world.ranks
        for e in compare_combined(cfg, r, combined[r], expected[r], topk_ids=dispatched[r].topk_ids)
    ]
    return Recording(cfg, seed, recorder, dispatched, differences)
