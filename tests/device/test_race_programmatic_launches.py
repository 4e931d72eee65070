"""A programmatic launch has seen its predecessor only after griddep_wait."""

import pytest
from litmus import DATA, OUT, REGIONS

from epmoe import device
from epmoe.device import griddep_launch, griddep_wait, kernel, load16_nc, load_i32, store_i32, thread_idx, u64
from epmoe_ref.errors import RaceError


@kernel()
def writes(params, num_tokens, my_rank):
    griddep_launch()
    store_i32(params + u64(DATA + 16 * thread_idx()), thread_idx())


def reads(when=None, load=load_i32):
    @kernel()
    def read(params, num_tokens, my_rank):
        if when == "before":
            griddep_wait()
        value = load(params + u64(DATA + 16 * thread_idx()))
        if when == "after":
            griddep_wait()
        store_i32(params + u64(OUT + 4 * thread_idx()), value if load is load_i32 else value[0])

    return read


def race_of(*launches):
    """The text of the race that launches (kernel, programmatic) of one stream make, or None."""
    machine = device.machine(1, seed=0, racecheck=True)
    buffer = machine.alloc(4096, "words", regions=REGIONS)
    try:
        buffer.fill(0)
        stream = machine.stream(0)
        for program, programmatic in launches:
            machine.launch(program, 1, 32, (buffer.address, 0, 0), stream=stream, programmatic=programmatic)
        machine.synchronize()
    except RaceError as race:
        return str(race)
    finally:
        buffer.free()


@pytest.mark.parametrize("when, is_race", [("before", False), ("after", True), (None, True)])
def test_what_the_launch_before_wrote_is_known_behind_the_wait(when, is_race):
    race = race_of((writes, False), (reads(when), True))
    assert "read  test_race_programmatic_launches.py" in race if is_race else race is None


@pytest.mark.parametrize("when", ["before", None])
def test_launches_that_are_not_programmatic_follow_one_another(when):
    assert race_of((writes, False), (reads(when), False)) is None
    assert race_of((writes, False), (reads("before"), True), (reads(), False)) is None


def test_non_coherent_loads_see_what_was_there_when_the_launch_began():
    assert race_of((writes, False), (reads("before", load16_nc), False)) is None
    assert "use load16" in race_of((writes, False), (reads("before", load16_nc), True))
