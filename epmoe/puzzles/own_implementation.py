"""A student's dispatch or combine as an implementation for `epmoe check`; the other half is the reference's."""

import dataclasses

import numpy as np

import epmoe_ref
from epmoe.check import Implementation
from epmoe.puzzles.world import Schedule, run

PLAIN = Schedule(0, races=False)


def own_dispatch(kernels, world):
    """The class to check: the student's dispatch. kernels: function (World) -> kernels. world: of puzzle 15."""

    class OwnDispatch(Implementation):
        def dispatch(self, input_tokens, topk_ids):
            made = world(_shape(self.cfg), tuple(map(len, topk_ids)), 1, ids=topk_ids, rows=input_tokens)
            self.want, out = epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids), []
            for memory in _ran(kernels, made):
                n = int(memory["row_offsets"][0, -1])
                rows, info = memory["rows"][0, :n], memory["src_info"][0, :n]
                out.append(dict(output_tokens=rows, row_offsets=memory["row_offsets"][0], src_info=info))
            return out

        def combine(self, expert_outputs, dispatched, router_weights):
            given = [
                dataclasses.replace(
                    want, src_info=np.ascontiguousarray(d["src_info"]), output_tokens=d["output_tokens"]
                )
                for want, d in zip(self.want, dispatched)
            ]
            return epmoe_ref.combine(self.cfg, expert_outputs, given, router_weights=router_weights)

    return OwnDispatch


def own_combine(kernels, world):
    """The same for the student's combine. world: of puzzle 16."""

    class OwnCombine(Implementation):
        def dispatch(self, input_tokens, topk_ids):
            self.ids = topk_ids
            return epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids)

        def combine(self, expert_outputs, dispatched, router_weights):
            infos = [d.src_info for d in dispatched]
            of_ranks = dict(ids=self.ids, rows=expert_outputs, infos=infos, weights=router_weights)
            made = world(_shape(self.cfg), tuple(map(len, self.ids)), 1, **of_ranks)
            return [memory["combined"][0, : len(ids)] for memory, ids in zip(_ran(kernels, made), self.ids)]

    return OwnCombine


def _shape(cfg):
    return cfg.n_ranks, cfg.n_experts, cfg.top_k, cfg.hidden, cfg.max_tokens_per_rank


def _ran(kernels, world):
    """The memory of all ranks after a run; raises what the simulator finds."""
    result = run(kernels(world), world, PLAIN)
    if result.error is not None:
        raise result.error
    return result.memory
