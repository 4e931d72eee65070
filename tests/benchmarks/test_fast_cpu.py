"""benchmarks.fast_cpu: a loop's thread leaves a CPU that has become slow."""

import os
import threading

import pytest

from benchmarks import fast_cpu

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux chooses CPUs")


@pytest.fixture
def cpus(monkeypatch):
    """{CPU: us of the piece there}, which tests change; and the CPUs that were chosen, in order."""
    us, chosen = dict.fromkeys(range(8), 1.0), [0]
    monkeypatch.setattr(os, "cpu_count", lambda: len(us))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, of: chosen.append(min(of)), raising=False)
    monkeypatch.setattr(os, "listdir", lambda folder: ["1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(us), raising=False)
    monkeypatch.setattr(fast_cpu, "piece_us", lambda: us[chosen[-1]])
    return us, chosen


def test_a_rank_settles_on_a_fast_cpu_of_its_share(cpus):
    us, chosen = cpus
    cpu = fast_cpu.FastCpu(1, 2)
    us.update({0: 2.0, 4: 2.0, 5: 2.0})
    assert cpu.settle() == 1.0 and chosen[-1] in (6, 7)
    us[chosen[-1]] = 2.0
    assert cpu.is_slow(cpu.look())
    assert cpu.settle() == 1.0 and chosen[-1] in (6, 7)


def test_it_tries_each_cpu_once_if_all_are_slow(cpus):
    us, chosen = cpus
    cpu = fast_cpu.FastCpu(0, 2)
    us.update(dict.fromkeys(us, 2.0))
    before = len(chosen)
    assert cpu.is_slow(cpu.settle())
    assert sorted(set(chosen[before:])) == [0, 1, 2, 3] and len(chosen) - before <= 5


def test_the_fastest_of_slow_ones_is_chosen(cpus):
    us, chosen = cpus
    cpu = fast_cpu.FastCpu(0, 2)
    us.update({0: 2.0, 1: 1.3, 2: 2.0, 3: 2.0})
    assert cpu.settle() == 1.3 and chosen[-1] == 1


@needs_linux
@pytest.mark.parametrize("together", [False, True])
def test_other_threads_follow_if_they_should(together):
    before, end = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        cpu = fast_cpu.FastCpu(0, 1)
        cpu.spread(together)
        all_cpus = os.sched_getaffinity(0)
        assert cpu.settle() > 0 and len(os.sched_getaffinity(0)) == 1
        of_other = os.sched_getaffinity(other.native_id)
        assert of_other == (os.sched_getaffinity(0) if together else all_cpus)
        cpu.release()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == before
    finally:
        end.set()
        other.join()


def test_it_measures_also_where_no_cpu_can_be_chosen(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    cpu = fast_cpu.FastCpu(0, 1)
    assert cpu.settle() > 0
    cpu.release()
