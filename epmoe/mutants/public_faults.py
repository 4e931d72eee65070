"""Four faults seen in public kernels, each as an edit of ours that the checker must reject.

An edit is (file, text, new text). The text must occur exactly once, so that an edit that no longer applies
fails loudly. README.md shows the reports, and a test compares them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from epmoe.mutants import edited_kernels
from epmoe.mutants.hunt import attempt
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.world_kinds import World
from epmoe.mutants.worlds import WORLDS

README = Path(__file__).with_name("README.md")
SMALL_REGION = World(
    "seven blocks, four flags", PLAIN | dict(n_experts=2, top_k=1), ((5, 3),), fused=True, shape=(7, 32)
)


@dataclass(frozen=True)
class Fault:
    """A fault. repair: more edits, with which nothing may be reported; repair_is describes them."""

    name: str
    what: str
    edits: tuple
    world: World
    repair: tuple = ()
    repair_is: str = ""


SIGNAL = """\
        to.signal(call, i32(expert // local), word.segment(i32(expert % local), call.my_rank), count)
"""
LAST_SIGNAL = """\
        dst_rank, index = i32(expert // local), word.segment(i32(expert % local), call.my_rank)
        if atomic_add_relaxed_gpu_i32(word.rank_completion(call.ep_counters, dst_rank), i32(1)) == local - 1:
            to.signal(call, dst_rank, index, count)
        else:
            counts = u64(load_u64(call.context + u64(8 * (cfg.p2p_world_size + dst_rank))))
            st_relaxed_sys_u64(counts + u64(8) * u64(index), u64(count))
"""
POLL = """\
        if polls.poll(call, flags):
"""
WAIT_FOR_FLAG = """\
        has_all, word = polls.poll(call, flags), counters.words(build.cfg)
        if block_idx() == 0:
            syncthreads()
            i = i32(thread_idx())
            while i < grid_dim() - 1:
                st_release_gpu_i32(word.combine_ready(call.ep_counters, i), i32(READY))
                i = i32(i + block_dim())
        elif thread_idx() == 0:
            flag = word.combine_ready(call.ep_counters, i32(block_idx() - 1))
            while ld_acquire_gpu_i32(flag) != READY:
                pass
            store_i32(flag, i32(0))
        if has_all:
"""

FAULTS = (
    Fault(
        "last signal found by a relaxed counter",
        "Only the last of a rank's signals to a peer is a release; the others are relaxed stores. Which one is "
        "the last is found by a relaxed fetch-add on the region rank completion. Nothing orders the messages behind "
        "the other signals before the last one, so the peer may read messages that have not arrived.",
        (
            ("pairs/signal.py", SIGNAL, LAST_SIGNAL),
            ("pairs/signal.py", "from epmoe.device import int32\n", "from epmoe.device import int32, load_u64\n"),
            (
                "pairs/signal.py",
                "                clear_single(call.ep_counters, i32(0))",
                "                clear_single(call.ep_counters, i32(0))\n                i = i32(0)\n"
                "                while recv_count and i < cfg.n_ranks:\n"
                "                    store_i32(word.rank_completion(call.ep_counters, i), i32(0))\n"
                "                    i = i32(i + 1)",
            ),
        ),
        WORLDS["three ranks, split"],
        (("pairs/signal.py", "            st_relaxed_sys_u64(counts", "            st_release_sys_u64(counts"),),
        "every signal is a release",
    ),
    Fault(
        "completion counters over region B",
        "Combine counts the rows that went back in words that overlap region B, which dispatch_wait leaves behind "
        "with its prefix sums. The count starts wrong, beyond the number at which a signal is sent, and it never is.",
        (("pairs/send_back.py", "word.finished(call.ep_counters, segment)", "word.b(call.ep_counters, segment)"),),
        WORLDS["split"],
    ),
    Fault(
        "waiting region smaller than the grid",
        "combine_wait has a ready flag for each of 2 n_experts reducing blocks, and the launch does not keep its "
        "grid within them: with 2 experts, 6 reducing blocks use 6 words of a region of 4.",
        (
            ("pairs/combine.py", POLL, WAIT_FOR_FLAG),
            (
                "pairs/combine.py",
                "from epmoe_ref.errors import EPValueError\n",
                "from epmoe_ref.config import READY; from epmoe_ref.errors import EPValueError\n"
                "from ..plain import counters\n",
            ),
        ),
        SMALL_REGION,
    ),
    Fault(
        "peer-written rows through the invariant load path",
        "dispatch_wait reads recv_buf by ld.global.nc, which is for what nobody writes while the kernel runs. Peers "
        "write recv_buf all the time; the load may return a line that was cached in an earlier round.",
        (("formats/row_copy.py", "if read_only else load16, part_bounds", "if read_only else load16_nc, part_bounds"),),
        WORLDS["fused"],
    ),
)


def edited(edits):
    """{file: source} of the kernels with these edits."""
    out = {}
    for file, text, new in edits:
        source = out.get(file) or edited_kernels.source_of(file)
        if source.count(text) != 1:
            raise ValueError(
                f"epmoe/kernels/{file} holds {text!r} {source.count(text)} times, not once: the fault's "
                "edit must follow the change of the kernel"
            )
        out[file] = source.replace(text, new)
    return out


def report(fault, seed=0):
    """(how it was noticed, the report) of a run with the fault. how is "" if it was not noticed."""
    return attempt(fault.world, seed, edited(fault.edits))


def repaired_is_silent(fault, seeds=3):
    """Whether the fault with its repair passes under this many schedules."""
    kernels = edited(fault.edits + fault.repair)
    return not any(attempt(fault.world, seed, kernels)[0] for seed in range(seeds))


def document():
    """The text of README.md, its last section made anew: each fault and its report under seed 0."""
    parts = [README.read_text().partition("\n## 1. ")[0]]
    for number, fault in enumerate(FAULTS, 1):
        _, said = report(fault)
        parts.append(
            f"\n## {number}. {fault.name[0].upper() + fault.name[1:]}\n\n{fault.what}\n\n```\n"
            f"{_without_addresses(said)}\n```\n"
        )
        if fault.repair:
            parts.append(f"\nRepaired ({fault.repair_is}), nothing is reported.\n")
    return "".join(parts)


def _without_addresses(said):
    """The report without addresses and neighbouring buffers, because they differ from run to run."""
    return re.sub(r" and \d+ bytes before .*", "", re.sub(r"0x[0-9a-f]+", "0x7f0000000000", said))
