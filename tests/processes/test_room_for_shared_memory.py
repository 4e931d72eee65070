"""A /dev/shm that is too small gives a clear error on every rank, before any page of it is touched."""

import pytest
from mpirun import mpirun

from epmoe import UnavailableError, doctor
from epmoe.worlds import shared_room


def test_too_little_room_is_told_on_every_rank_with_numbers_and_remedy_and_the_job_goes_on():
    job = mpirun(2, "small_shm_program.py")
    assert job.status == 0, job.output
    told = job.said(
        r"rank (\d): memory of 2 ranks needs (\d+) bytes of /dev/shm, which has (\d+) left of (\d+): .*?"
        r"--shm-size=1g"
    )
    assert sorted(rank for rank, *_ in told) == ["0", "1"] and told[0][2:] == (
        str(60 << 20),
        str(64 << 20),
    ), job.output
    assert int(told[0][1]) > 100 << 20 and job.output.count("went on") == 2


def test_the_remedy_names_a_size_that_is_enough():
    with pytest.raises(
        UnavailableError, match="needs 5000000000 bytes .* has 1000 left of 2000.*--shm-size=5g"
    ):
        shared_room.expect_room(5_000_000_000, (1000, 2000), "it")
    shared_room.expect_room(
        5_000_000_000, None, "it"
    )  # no such folder: MPI shares memory otherwise
    shared_room.expect_room(5_000_000_000, (6_000_000_000, 6_000_000_000), "it")


@pytest.mark.parametrize(
    "room, state",
    [((60 << 20, 64 << 20), doctor.OPTIONAL), ((1 << 30, 1 << 30), doctor.OK), (None, doctor.OK)],
)
def test_doctor_shows_the_room(monkeypatch, room, state):
    monkeypatch.setattr(shared_room, "room", lambda: room)
    finding = doctor.shared_memory()
    assert finding.state == state and ("--shm-size" in finding.remedy) == (state != doctor.OK)
