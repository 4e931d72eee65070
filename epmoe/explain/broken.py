"""Records correct runs of the plain kernels and runs with one mistake in the simulator, to show the failure.

Two ranks have one expert each. Rank 0 sends a token, whose numbers are all 1.5, to rank 1. The slot there holds 7s from
an earlier round. Each rank has two blocks of one warp: block 0 writes the message, block 1 signals.
"""

import importlib
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np

from epmoe import device, layout
from epmoe.device.sim.recorder import Recorder
from epmoe.kernels import LaunchConfig, plain
from epmoe.kernels.plain.arguments import capacity
from epmoe.mutants import edited_kernels
from epmoe_ref.config import EPConfig
from epmoe_ref.errors import EPError

CFG = EPConfig(2, 2, 1, 8, 2)
LAUNCH = LaunchConfig(n_sms=2, num_threads=32)
OLD, FIRST, SECOND = 7.0, 1.5, 2.5
SEEDS = range(100)  # schedules to try until the mistake shows


class Mistake(NamedTuple):
    """A mistake: its name, a file of epmoe/kernels, edits [(old, new)] of it, and words that the picture shows."""

    name: str
    file: str
    edits: tuple
    words: tuple
    rounds: bool = False  # a second round follows: after combine if correct, at once if broken
    slow: tuple = ()  # ranks that are slow
    seed: int = 0  # a schedule in which the mistake shows; if it no longer does, SEEDS are tried


SENDING = ("message", "reserved", "finished", "recv_count", "row")
COUNT = "red_add_release_gpu_i32(word.finished(ep_counters, i), i32(1))"
WRITE = "        to_peers.write(to, "
MISTAKES = (
    Mistake("missing-release", "plain/dispatch.py", ((COUNT, COUNT.replace("release", "relaxed")),), SENDING),
    Mistake(
        "counting-before-writing",
        "plain/dispatch.py",
        ((COUNT, "pass"), (WRITE, f"        if lane == 0:\n            {COUNT}\n{WRITE}")),
        SENDING,
        slow=(0,),
        seed=17,
    ),
    Mistake(
        "claimed-for-written",
        "plain/dispatch.py",
        (("(word.finished(ep_counters, i), count", "(word.reserved(ep_counters, i), count"),),
        SENDING,
    ),
    Mistake("second-dispatch", "", (), ("message", "recv_count", "row", "row2"), rounds=True, slow=(1,), seed=20),
    Mistake(
        "early-reset",
        "plain/receive.py",
        (("i32(1)) == grid_dim() - 1", "i32(1)) == 0"),),
        ("message", "finished", "D", "recv_count", "row"),
        seed=1,
    ),
)


@dataclass
class Run:
    """A run: its recorder, reports of races and of the hang, and buffers by (name, rank)."""

    recorder: Recorder
    buffers: dict
    reports: list = field(default_factory=list)

    def row(self, name="row"):
        """The first number of row 0 of rank 1."""
        return float(self.buffers[name, 1].read(np.dtype(ml_dtypes.bfloat16), (8,))[0])


def run(kernels, seed, *, again=None, slow=()):
    """Run dispatch on both ranks. again: None; or run a second dispatch, after "combine", or, with "", at once.

    slow: ranks that run more slowly than the others.
    """
    recorder = Recorder()
    machine = device.machine(2, seed=seed, recorder=recorder, stop_at_first_race=False)
    machine.slow_ranks = slow
    made = Run(recorder, {})
    for rank in range(2):
        base = made.buffers["base", rank] = machine.alloc(
            layout.total_bytes(CFG), "base", rank=rank, regions=layout.named_words(CFG)
        )
        for region in layout.regions(CFG):
            base.write(np.full(region.shape, region.initial or 0, region.dtype), region.offset)
        base.write(np.tile(message_of(OLD), 4), layout.region(CFG, "dispatch_recv_buf").offset)
    sets = _arguments(machine, made, FIRST, "row")
    try:
        with machine.hold():
            streams = [machine.stream(r) for r in range(2)]
            for rank in range(2):
                _dispatch(kernels, made, rank, streams[rank], sets[rank])
            if again == "combine":
                for rank in range(2):
                    _combine(kernels, made, rank, streams[rank], sets[rank])
            if again is not None:
                later = _arguments(machine, made, SECOND, "row2")
                for rank in range(2):
                    _dispatch(kernels, made, rank, streams[rank], later[rank])
    except EPError as error:
        made.reports.append(str(error))
    made.reports[:0] = [str(r) for r in machine.races]
    return made


def message_of(value):
    """The bytes of token 0's message, all of whose numbers are `value`."""
    sizes = layout.message(CFG)
    raw = np.zeros(sizes.msg_bytes, np.uint8)
    raw[:16] = np.full(8, value, ml_dtypes.bfloat16).view(np.uint8)
    raw[sizes.topk_info_offset : sizes.topk_info_offset + 2] = np.array([1], np.uint16).view(np.uint8)
    return raw


def _arguments(machine, made, value, row):
    sets = []
    for rank, n in ((0, 1), (1, 0)):

        def array(name, dtype, shape, fill, rank=rank):
            values = np.full(shape, fill, dtype)
            buffer = made.buffers[name, rank] = machine.alloc(max(16, values.nbytes), name, rank=rank)
            buffer.write(values)
            return buffer.array(dtype, shape)

        rows = capacity(CFG)
        sets.append(
            dict(
                x=array("x" + row, ml_dtypes.bfloat16, (n, 8), value),
                ids=array("ids" + row, np.int32, (n, 1), 1),
                results=(
                    {"output_tokens": array(row, ml_dtypes.bfloat16, (rows, 8), 0)},
                    array("offsets" + row, np.uint32, (2,), 0),
                    array("experts" + row, np.int32, (1,), 0),
                    array("src" + row, np.int32, (rows, 2), -1),
                ),
                out=array("out" + row, ml_dtypes.bfloat16, (n, 8), 0),
                y=array("y" + row, ml_dtypes.bfloat16, (rows, 8), 1),
                weights=array("w" + row, np.float32, (n, 1), 1),
            )
        )
    return sets


def at(made, name, rank):
    """Address of a region of a rank."""
    return made.buffers["base", rank].address + layout.region(CFG, name).offset


def _received(made, phase):
    """Addresses of recv_buf and recv_count of each rank."""
    return [tuple(at(made, f"{phase}_{name}", r) for r in range(2)) for name in ("recv_buf", "recv_count")]


def _dispatch(kernels, made, rank, stream, a):
    kernels.dispatch_kernel(CFG, LAUNCH)[2, 32, stream](
        a["x"],
        a["ids"],
        *a["results"],
        at(made, "dispatch_send_buf", rank),
        *_received(made, "dispatch"),
        at(made, "ep_counters", rank),
        rank,
    )


def _combine(kernels, made, rank, stream, a):
    kernels.combine_kernel(CFG, LAUNCH, router_weights_wrapper=plain.given_weights)[2, 32, stream](
        a["y"],
        a["results"][3],
        a["out"],
        0,
        *_received(made, "combine"),
        at(made, "ep_counters", rank),
        a["ids"],
        rank,
        router_weights_args=(a["weights"],),
    )


def edited(mistake):
    """The plain kernels with a mistake."""
    if not mistake.edits:
        return plain
    text = edited_kernels.source_of(mistake.file)
    for old, new in mistake.edits:
        if text.count(old) != 1:
            raise EPError(f"{mistake.name}: {old.strip()!r} stands {text.count(old)} times in {mistake.file}, not once")
        text = text.replace(old, new)
    package = edited_kernels.load({mistake.file: text})
    return importlib.import_module(package.__name__ + ".plain")
