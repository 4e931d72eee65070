"""Runs a puzzle's kernels on a GPU, in a process of its own, as often as it takes for a race to show, perhaps.

Says what child.py says. On a GPU there is no race detector: only a wrong result or a hang can be seen.
"""

import os

from epmoe import guard
from epmoe.lessons.judge import verdict_of
from epmoe_ref.errors import UnavailableError

PATIENCE_S = 60  # compiling takes some of them
TIMES = 20
MODULE = "epmoe.puzzles.on_gpu"


def verdict(number, file, **how):
    """("right" or "wrong", words) of a file that is right in the simulator. EPValueError if there is no GPU."""
    return verdict_of(MODULE, dict(number=number, file=str(file)), PATIENCE_S, **how)


def run(task, say):
    """Run the kernels of task, {"number", "file"}, in every world of the puzzle."""
    os.environ["EPMOE_DEVICE"] = "gpu"
    from epmoe.lessons.answers import Wrong, load
    from epmoe.puzzles import puzzle

    number, file = task["number"], task["file"]
    try:
        asked = puzzle(number)
        say(["begun", ""])
        answer = load(file, number, "puzzle")
        for world in asked.worlds():
            _tried(asked, answer, world)
            say(["begun", ""])
        say(["right", f"on the GPU: right in all {len(asked.worlds())} worlds, {TIMES} times each."])
    except UnavailableError as error:
        say(["cannot", str(error).replace("EPMOE_DEVICE=sim runs the simulator instead", "leave out --gpu")])
    except Wrong as error:
        say(["wrong", str(error)])
    except Exception as error:  # Numba's, for instance: what it cannot compile
        text = " ".join(str(error).split())
        say(["wrong", f"on the GPU: {type(error).__name__}: {text[:600]}"])


def _tried(asked, answer, world):
    from epmoe import device
    from epmoe.lessons.answers import Wrong
    from epmoe.puzzles.pictures import difference, picture
    from epmoe.puzzles.world import Memory

    if asked.make:
        kernels = getattr(answer, asked.make)(*world.data["shape"])
    else:
        kernels = [getattr(answer, name) for name in asked.kernels]
    for time in range(TIMES):
        memory = Memory(device.machine(world.n_ranks), world)
        try:
            memory.launch(kernels)
            held = memory.read()
        finally:
            memory.free()
        held = asked.canonical(held, world) if asked.canonical else held
        place = difference(held, world)
        if place:
            raise Wrong(
                f"on the GPU the memory is not as it should be, in run {time + 1} of {TIMES}: {world.name}\n\n"
                + picture(held, world, place)
            )


if __name__ == "__main__":
    guard.child(run)
