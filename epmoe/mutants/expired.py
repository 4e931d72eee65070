"""Worlds in which waits expire: which wait each rank must record, and which memory must stay untouched.

A wait that expires ends its kernel and all later ones of its rank. Nothing is copied from data that did not arrive.
"""

import numpy as np

from epmoe import layout
from epmoe.device import block_idx, i32, kernel, load_u64, store_i32, thread_idx
from epmoe.device.sim.memory import POISON
from epmoe.kernels import status
from epmoe.layout import MAX_FINITE
from epmoe.mutants.errors import Leftover, WrongResult
from epmoe.mutants.world_inputs import inputs
from epmoe.mutants.world_kinds import PlainWorld

STUCK_EXPERT = 1  # of rank 0
NEVER = -1000  # added to a number of finished pieces, it never equals a count of these worlds
WAITED = {  # (absent?, stuck in, rank) -> the phase and the wait that expire
    ("absent", 0): (status.DISPATCH_WAIT, status.FOR_RECV_COUNT),
    ("dispatch", 0): (status.COMBINE_WAIT, status.FOR_RECV_COUNT),  # rank 1 has stopped
    ("dispatch", 1): (status.DISPATCH_WAIT, status.FOR_RECV_COUNT),
    ("combine", 0): (0, 0),
    ("combine", 1): (status.COMBINE_WAIT, status.FOR_RECV_COUNT),
}


@kernel
def spoil_word(params, num_tokens, my_rank):
    """Write NEVER to the word whose address is in the parameters."""
    if block_idx() == 0 and thread_idx() == 0:
        store_i32(load_u64(params), i32(NEVER))


def spoil(run):
    """Queue a kernel that overwrites finished[local expert STUCK_EXPERT, rank 1] of rank 0."""
    region = next(c for c in layout.counter_regions(run.cfg) if c.name == "finished")
    entry = STUCK_EXPERT * run.cfg.n_src_ranks + 1
    word = np.array([run.at(0, "ep_counters") + region.offset + 4 * entry], np.uint64)
    run.machine.launch(spoil_word, 1, 32, (run.put("address to spoil", 0, word), 0, 0), stream=run.streams[0])


def check(run, rounds):
    """Raise WrongResult or Leftover unless the right waits expired and no result was written."""
    world = run.world
    for rank in run.ranks:
        words = run.regions[rank]["status"].array(np.int32, layout.STATUS_WORDS)
        wanted = WAITED["absent" if world.absent else world.stuck, rank]
        if isinstance(world, PlainWorld) and (world.stuck, rank) == ("dispatch", 0):
            # the signalling block waits for the rows that it announces
            wanted = (status.DISPATCH_ASYNC, status.FOR_FINISHED)
        if wanted[0] == status.COMBINE_WAIT and run.returned_to == "combine_lamport_buf":
            wanted = status.COMBINE_WAIT, status.FOR_ROWS
        if (words[status.FAILED], words[status.WAITED_FOR]) != wanted:
            raise WrongResult(f"status of rank {rank} is {words.tolist()}; it must begin with {wanted}")
        if isinstance(world, PlainWorld) and wanted[1] == status.FOR_RECV_COUNT:
            _index_of_a_missing_signal(run, rank, words)
        for number, results in enumerate(rounds, 1):
            groups, combined = results[rank]
            if wanted[0]:
                _no_row_missing(run, rank, f"round {number}, rank {rank}: combined", combined)
            if world.absent:
                _untouched(f"round {number}, rank {rank}: output_tokens", groups["output_tokens"])
                _untouched(f"round {number}, rank {rank}: row_offsets[1:]", groups["row_offsets"], first=1)
            if world.absent and number > 1:  # this round must not begin
                _untouched(f"round {number}, rank {rank}: clean_topk_ids", groups["topk_ids"])
            if world.stuck == "dispatch" and rank == 1:
                # other messages have arrived and may be copied; counts are known, so row_offsets are written
                ids, expert = inputs(world)[0][2], run.cfg.n_local_experts  # rank 1's first
                first = sum(int((of_rank == expert).sum()) for of_rank in ids)
                end = first + int((ids[0] == expert + 1).sum())
                _untouched(f"rank {rank}: rows of local expert 1 from rank 0", groups["output_tokens"], first, end)
        if world.absent and not run.may_send_few(rank, 0):
            _claims_of_one_round(run, rank)
        if world.absent and isinstance(world, PlainWorld):
            _signals_of_one_round(run, rank)


def _index_of_a_missing_signal(run, rank, words):
    """The status words must name a word of recv_count that has no signal."""
    counts = run.regions[rank][status.failed_recv_count(words)]
    n = run.cfg.n_local_experts * run.cfg.n_src_ranks
    missing = np.flatnonzero(counts.array(np.uint64, n) == MAX_FINITE)
    if words[status.INDEX] not in missing:
        raise WrongResult(
            f"status of rank {rank} names recv_count word {words[status.INDEX]}; without a signal are {missing}"
        )


def _no_row_missing(run, rank, what, combined):
    """Nothing may be written, or, if combine waits, only tokens whose rows all arrived."""
    if WAITED[run.world.stuck or "absent", rank][0] != status.COMBINE_WAIT:
        return _untouched(what, combined)
    for token, ids in enumerate(inputs(run.world)[0][2][rank]):
        missing = ids == STUCK_EXPERT if run.world.stuck == "combine" else ids >= run.cfg.n_local_experts  # of rank 1
        if missing.any():
            _untouched(f"{what}[{token}]", combined, token, token + 1)


def _untouched(what, array, first=0, end=None):
    buffer, shape, dtype = array
    if (buffer.read(dtype, shape)[first:end].view(np.uint8) != POISON).any():
        raise Leftover(f"{what} was written, though the wait for it expired")


def _claims_of_one_round(run, rank):
    """The second round must not have begun: `reserved` counts only the messages of the first one."""
    cfg, claimed = run.cfg, run.counters(rank, "reserved")
    ids = inputs(run.world)[0][2][rank]
    counts = np.bincount(ids[ids >= 0], minlength=cfg.n_experts).reshape(cfg.n_ranks, cfg.n_local_experts).T
    if (claimed != counts).any():
        raise Leftover(
            f"reserved of rank {rank} is {claimed.tolist()}, round 1 claimed {counts.tolist()}: a kernel "
            "went on after a wait had expired"
        )


def _signals_of_one_round(run, rank):
    """Rank completion counts the signals of the first round. Only the end of dispatch_wait resets it."""
    told, cfg = run.counters(rank, "rank_completion"), run.cfg
    wanted = np.where(np.arange(len(told)) < cfg.p2p_world_size, cfg.n_local_experts, 0)
    if (told != wanted).any() or (run.counters(rank, "finished") != run.counters(rank, "reserved")).any():
        raise Leftover(
            f"rank completion of rank {rank} is {told.tolist()}, {wanted.tolist()} signals were sent; or "
            "finished differs from reserved"
        )
