"""Four faults seen in public kernels, each as an edit of ours that the checker must reject.

An edit is (file, text, new text); the text must occur exactly once, so that an edit that no longer applies
fails loudly. README.md shows the reports, and a test compares them.
"""

from dataclasses import dataclass

from epmoe.mutants import edited_kernels
from epmoe.mutants.hunt import attempt
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.world_kinds import World
from epmoe.mutants.worlds import WORLDS

SMALL_REGION = World(
    "seven blocks, four flags",
    PLAIN | dict(n_experts=2, top_k=1),
    ((5, 3),),
    fused=True,
    shape=(7, 32),
)


@dataclass(frozen=True)
class Fault:
    """A fault. repair: more edits, after which nothing may be reported; repair_is describes them."""

    name: str
    what: str
    edits: tuple
    world: World
    repair: tuple = ()
    repair_is: str = ""


SIGNAL = """\
        signal(params, i32(expert // local), my_rank, index_of(expert, my_rank), count)
"""
LAST_SIGNAL = """\
        owner = i32(expert // local)
        written = params[p_counters] + u64(at.finished + 4 * cfg.n_experts) + u64(4) * u64(owner)
        if atomic_add_relaxed_gpu_i32(written, i32(1)) == local - 1:
            signal(params, owner, my_rank, index_of(expert, my_rank), count)
        else:
            word = u64(load_u64(params[0] + u64(8 * (block.context_index("recv_count_ptrs") + owner))))
            st_relaxed_sys_u64(word + u64(8) * u64(index_of(expert, my_rank)), u64(count))
"""
WATCH = """\
        if watch(params, status, flags):
"""
WAIT_FOR_FLAG = """\
        has_all = watch(params, status, flags)
        ready = words + u64(counters.words(cfg).combine_ready)
        if block_idx() == 0:
            syncthreads()
            i = i32(thread_idx())
            while i < grid_dim() - 1:
                st_release_gpu_i32(ready + u64(4) * u64(i), i32(READY))
                i = i32(i + block_dim())
        elif thread_idx() == 0:
            flag = ready + u64(4) * u64(block_idx() - 1)
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
            ("signaller.py", SIGNAL, LAST_SIGNAL),
            (
                "signaller.py",
                "from epmoe.device import int32\n",
                "from epmoe.device import int32, load_u64\n",
            ),
            (
                "signaller.py",
                "            signal(params, owner, my_rank, index, count)\n",
                "            signal_expert(params, expert, my_rank, count)\n",
            ),
            (
                "dispatch.py",
                "store_i32(words + u64(at.g), i32(0))",
                "store_i32(words + u64(at.g), i32(0))\n            i = i32(0)\n            while i < cfg.n_ranks:\n"
                "                store_i32(words + u64(at.finished + 4 * cfg.n_experts + 4 * i), i32(0))\n"
                "                i = i32(i + 1)",
            ),
        ),
        WORLDS["three ranks, split"],
        (
            (
                "signaller.py",
                "            st_relaxed_sys_u64(word",
                "            st_release_sys_u64(word",
            ),
        ),
        "every signal is a release",
    ),
    Fault(
        "completion counters over region B",
        "Combine counts the rows that went back in words that overlap region B, which dispatch_wait leaves behind "
        "with its prefix sums. The count starts wrong, beyond the number at which a signal is sent, and it never is.",
        (
            (
                "row_runs.py",
                "words + u64(at.finished) + u64(4) * u64(entry)",
                "words + u64(at.b) + u64(4) * u64(entry)",
            ),
        ),
        WORLDS["split"],
    ),
    Fault(
        "waiting region smaller than the grid",
        "combine_wait has a ready flag for each of 2 n_experts reducing blocks, and the launch does not keep its "
        "grid within them: with 2 experts, 6 reducing blocks use 6 words of a region of 4.",
        (
            ("combine.py", WATCH, WAIT_FOR_FLAG),
            (
                "combine.py",
                "from epmoe_ref.errors import EPValueError\n",
                "from epmoe_ref.config import READY; from epmoe_ref.errors import EPValueError\n",
            ),
        ),
        SMALL_REGION,
    ),
    Fault(
        "peer-written rows through the invariant load path",
        "dispatch_wait reads recv_buf by ld.global.nc, which is for what nobody writes while the kernel runs. Peers "
        "write recv_buf all the time; the load may return a line that was cached in an earlier round.",
        (
            (
                "formats/row_copy.py",
                "most_parts(n_bytes), load16\n",
                "most_parts(n_bytes), load16_nc\n",
            ),
        ),
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
    """(how it was noticed, the report) of a run with the fault; how is "" if it was not."""
    return attempt(fault.world, seed, edited(fault.edits))


def repaired_is_silent(fault, seeds=3):
    """Whether the fault with its repair passes under these many schedules."""
    kernels = _with_repair(fault)
    return not any(attempt(fault.world, seed, kernels)[0] for seed in range(seeds))


def _with_repair(fault):
    sources = edited(fault.edits)
    for file, text, new in fault.repair:
        if sources[file].count(text) != 1:
            raise ValueError(f"the repair's text {text!r} is not in {file} with the fault in it")
        sources[file] = sources[file].replace(text, new)
    return sources
