"""A student's dispatch or combine as an implementation for `epmoe check`; the other half is the reference's."""

import dataclasses

import numpy as np

import epmoe_ref
from epmoe.check import Implementation
from epmoe.puzzles.world import Schedule, run

PLAIN = Schedule(0, races=False)


def implementation(name, made):
    """The class to check. name: "dispatch" or "combine". made: function (World) -> kernels."""
    return {"dispatch": OwnDispatch, "combine": OwnCombine}[name].of(made)


class _Own(Implementation):
    made = None

    @classmethod
    def of(cls, made):
        """This class with the kernels that `made` gives."""
        return type(cls.__name__, (cls,), {"made": staticmethod(made)})

    def shape(self):
        """The shape that the kernels are made for."""
        c = self.cfg
        return c.n_ranks, c.n_experts, c.top_k, c.hidden, c.max_tokens_per_rank

    def ran(self, world):
        """The memory of all ranks after a run; raises what the simulator finds."""
        result = run(self.made(world), world, PLAIN)
        if result.error is not None:
            raise result.error
        return result.memory


class OwnDispatch(_Own):
    """The student's dispatch, the reference's combine."""

    def dispatch(self, input_tokens, topk_ids):
        from epmoe.puzzles.p15_your_own_dispatch import world

        tokens = tuple(map(len, topk_ids))
        made = world(self.shape(), tokens, 1, ids=topk_ids, rows=input_tokens)
        self.want, out = epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids), []
        for memory in self.ran(made):
            n = int(memory["row_offsets"][0, -1])
            rows, info = memory["rows"][0, :n], memory["src_info"][0, :n]
            out.append(dict(output_tokens=rows, row_offsets=memory["row_offsets"][0], src_info=info))
        return out

    def combine(self, expert_outputs, dispatched, router_weights):
        given = [
            dataclasses.replace(want, src_info=np.ascontiguousarray(d["src_info"]), output_tokens=d["output_tokens"])
            for want, d in zip(self.want, dispatched)
        ]
        return epmoe_ref.combine(self.cfg, expert_outputs, given, router_weights=router_weights)


class OwnCombine(_Own):
    """The reference's dispatch, the student's combine."""

    def dispatch(self, input_tokens, topk_ids):
        self.ids = topk_ids
        return epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids)

    def combine(self, expert_outputs, dispatched, router_weights):
        from epmoe.puzzles.p16_your_own_combine import world

        made = world(
            self.shape(),
            tuple(map(len, self.ids)),
            1,
            ids=self.ids,
            rows=expert_outputs,
            infos=[d.src_info for d in dispatched],
            weights=router_weights,
        )
        return [memory["combined"][0, : len(ids)] for memory, ids in zip(self.ran(made), self.ids)]
