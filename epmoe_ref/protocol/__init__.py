"""The protocol as a state machine: what every word of every buffer, signal and counter holds, step by step.

Each rank repeats four steps, without a reset between rounds:

    dispatch_async -> dispatch_wait -> combine_async -> combine_wait -> dispatch_async ...

    machine = World(cfg)
    for rank in range(cfg.n_ranks):
        machine.dispatch_async(rank, input_tokens[rank], topk_ids[rank])
    d = machine.dispatch_wait(0)            # the Dispatched of rank 0; the others may be at any step
    machine.ranks[0].region("A")            # what its words hold now: RankState

A step is a function of one rank's state (RankState) and its inputs. It returns a Step: the rank's next state, its
writes to other ranks, and its result. A fused kernel is two steps in a row. World holds the states of all ranks,
delivers writes, and lets ranks step in any legal order. dispatch_wait needs the dispatch signals of all ranks and
combine_wait their combine signals. Nothing else orders two ranks.

`epmoe_ref.words` says which words of a state are fixed, which are free, and by which rule. `epmoe.check` compares
another implementation's memory with it.
"""

from .combine import combine_async, combine_wait
from .dispatch import dispatch_async, dispatch_wait
from .state import MAX_FINITE, STEPS, RankState, Step, Write
from .world import World

__all__ = ["MAX_FINITE", "RankState", "STEPS", "Step", "World", "Write",
           "combine_async", "combine_wait", "dispatch_async", "dispatch_wait"]  # fmt: skip
