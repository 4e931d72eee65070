"""Runs small programs in the simulator: their operations in order, as in ptx_model, and the first race found.

A program is a list of steps (word, address, value) for each thread. Two steps are no intrinsics:
"skip_if_zero" leaves out the next `value` steps, barriers excepted, if the last word read was 0; "pause" takes `value`
operations. Addresses below SHARED are bytes of one buffer that all ranks use; those from SHARED on are bytes of the
block's dynamic shared memory.
"""

import re
from dataclasses import replace

from ptx_model import Operation, Thread

from epmoe import device
from epmoe.device import kernel, u32, u64
from epmoe.device.sim.detector import Detector

SHARED, BLOCK_SHARED, GLOBAL_BYTES, SHARED_BYTES = 1 << 16, 1 << 12, 256, 64
WIDTHS = {"u8": 1, "u16": 2, "i32": 4, "u32": 4, "f32": 4, "u64": 8, "16": 16}
STRONG = re.compile(
    r"(ld|st|red_add|atomic_add|atomic_max|atomic_or|atomic_cas)_(relaxed|acquire|release|acq_rel)_"
    r"(cta|gpu|sys)_(i32|u32|u64)"
)
# model's address of a shared array's first element; the place in the array is the rest
ARRAY = SHARED + 1024
KINDS = {"ld": "read", "st": "write", "red_add": "reduction"}
BY_NAME = {
    "fence_proxy_async": "proxy fence",
    "bulk_commit": "commit",
    "bulk_wait": "wait",
    "bulk_wait_read": "wait read",
    "syncthreads": "barrier",
    "syncwarp": "barrier",
}


def operations_of(step, thread, group):
    """The operations of one step, from the name of its intrinsic."""
    word, address, value = step
    if address >= SHARED:
        address += BLOCK_SHARED * (1 + 2 * thread.rank + thread.block)
    strong = STRONG.fullmatch(word)
    if strong:
        what, order, scope, width = strong.groups()
        return [
            Operation(
                thread,
                KINDS.get(what, "atomic"),
                order,
                scope,
                address,
                WIDTHS[width],
                value=value if what == "st" else None,
            )
        ]
    if word == "shared_add_i32":
        return [Operation(thread, "atomic", "relaxed", "cta", address, 4)]
    if word in ("load16_relaxed_sys", "store16_relaxed_sys"):
        kind = "read" if word.startswith("load") else "write"
        return [
            Operation(thread, kind, "relaxed", "sys", address + 4 * i, 4, value=value if kind == "write" else None)
            for i in range(4)
        ]
    if word.startswith("fence_acq_rel"):
        return [Operation(thread, "fence", "acq_rel", word.rpartition("_")[2])]
    if word in BY_NAME:
        return [Operation(thread, BY_NAME[word], group=group)]
    if word == "bulk_store":  # 16 bytes from the same place of the block's shared memory
        source = SHARED + BLOCK_SHARED * (1 + 2 * thread.rank + thread.block) + address % SHARED_BYTES
        return [
            Operation(thread, "copy read", address=source, nbytes=16),
            Operation(thread, "copy write", address=address, nbytes=16),
        ]
    what, width = re.fullmatch(r"(?:shared_|array_)?(load|store)_?(\w+?)(?:_nc)?", word).groups()
    return [
        Operation(
            thread,
            "read" if what == "load" else "write",
            address=address,
            nbytes=WIDTHS[width],
            non_coherent=word.endswith("_nc"),
        )
    ]


def perform(step, base, array):
    """Do one step, in a kernel; returns what it read, if anything. array: the block's int32 array in shared memory."""
    word, address, value = step
    if word == "array_load_i32":
        return array[(address - ARRAY) // 4]
    if word == "array_store_i32":
        array[(address - ARRAY) // 4] = value
        return None
    if word == "pause":
        for _ in range(value):
            device.nanosleep(1)
        return None
    op = getattr(device, word)
    if word in BY_NAME or word.startswith("fence_acq_rel"):
        op()
    elif word == "shared_add_i32":
        return op(array, (address - ARRAY) // 4, value)
    elif word == "bulk_store":
        op(u64(base + address), u32(device.dynamic_shared() + address % SHARED_BYTES), u32(16))
    else:
        at = u64(base + address) if address < SHARED else u32(device.dynamic_shared() + address - SHARED)
        if "store16" in word:
            op(at, value, value, value, value)
        elif word.startswith("atomic_cas"):
            return op(at, 0, value)
        elif word.startswith(("ld", "load", "shared_load")):
            return op(at)
        else:
            return op(at, value)
    return None


class Notes:
    """The operations of a run, and the numbers of those at which the detector found a race or an order missing."""

    def __init__(self):
        self.ops, self.races, self.orders = [], [], []
        self.current, self.done, self.groups, self.at = {}, {}, 0, 0


class NotingDetector(Detector):
    """The race detector, which continues after a race and records its calls."""

    notes = None

    def note(self, a, group=None):
        notes = self.notes
        who = Thread(a.rank, a.block.index, a.tid, a.launch.ordinal)
        at, step = notes.current[who]
        made = operations_of(step, who, group)
        if step[0] in ("load16_relaxed_sys", "store16_relaxed_sys"):  # the detector sees each word
            made = [made[notes.done.get((who, at), 0)]]
            notes.done[who, at] = notes.done.get((who, at), 0) + 1
        notes.ops += made
        notes.at = len(notes.ops) - 1

    def bulk(self, e, address, nbytes, write, *args):
        self.notes.at = len(self.notes.ops) - (1 if write else 2)
        super().bulk(e, address, nbytes, write, *args)

    def plain(self, a, *args):
        self.note(a)
        super().plain(a, *args)

    def strong(self, a, *args):
        self.note(a)
        op, before = self.notes.ops[-1], args[-2]
        if op.kind == "atomic" and args[7].startswith("atomic_cas") and before != 0:
            # a comparison with 0 that fails is a read (8.4)
            order = "acquire" if op.order == "acq_rel" else "relaxed"
            self.notes.ops[-1] = replace(op, kind="read", order=order)
        return super().strong(a, *args)

    def fence(self, a, *args):
        self.note(a)
        super().fence(a, *args)

    def fence_proxy(self, a):
        self.note(a)
        super().fence_proxy(a)

    def bulk_store(self, a, *args):
        self.note(a)
        super().bulk_store(a, *args)

    def bulk_commit(self, a):
        self.note(a)
        super().bulk_commit(a)

    def bulk_wait(self, a, *args):
        self.note(a)
        super().bulk_wait(a, *args)

    def barrier(self, actors):
        self.notes.groups += 1
        for a in actors:
            self.note(a, self.notes.groups)
        super().barrier(actors)

    def race(self, first, second, span, kind=None):
        (self.notes.orders if kind == "order" else self.notes.races).append(self.notes.at)

    def report(self, text):
        """For threads that end before their copies complete: no conflict of accesses."""


def run(programs, seed, *, ranks=2, grid=2, block=64, launches=1):
    """Run programs ({(launch, rank, block, thread): steps}) by a schedule; returns the Notes."""
    notes = Notes()

    @kernel()
    def body(params, launch, my_rank):
        who = launch, my_rank, device.block_idx(), device.thread_idx()
        thread = Thread(my_rank, who[2], who[3], launch)
        seen, skip, array = None, 0, device.shared_array(4, device.int32)
        for at, step in enumerate(programs.get(who, ())):
            if skip and step[0] not in ("syncthreads", "syncwarp"):
                skip -= 1
            elif step[0] == "skip_if_zero":
                skip = step[2] if seen == 0 else 0
            else:
                notes.current[thread] = at, step
                seen = perform(step, params, array)

    machine = device.machine(ranks, seed=seed, racecheck=True)

    def new_detector(queues):
        detector = NotingDetector(machine, queues)
        detector.notes = notes
        return detector

    machine.new_detector = new_detector
    buffer = machine.alloc(GLOBAL_BYTES, "words")
    try:
        buffer.fill(0)
        with machine.hold():
            streams = [machine.stream(rank) for rank in range(ranks)]
            for launch in range(1, launches + 1):
                for rank in range(ranks):
                    machine.launch(
                        body,
                        grid,
                        block,
                        (buffer.address, launch, rank),
                        stream=streams[rank],
                        shared_bytes=SHARED_BYTES,
                    )
    finally:
        buffer.free()
    return notes
