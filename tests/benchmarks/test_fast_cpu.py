"""benchmarks.fast_cpu: a loop's thread leaves a CPU that has become slow."""

import os

import pytest

from benchmarks import fast_cpu

needs_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux chooses CPUs"
)


@pytest.fixture
def cpus(monkeypatch):
    """{CPU: us of the piece there}, which tests change; and the CPUs that were chosen, in order."""
    us, chosen = dict.fromkeys(range(8), 1.0), [0]
    monkeypatch.setattr(os, "cpu_count", lambda: len(us))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, of: chosen.append(min(of)), raising=False
    )
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
    assert sorted(chosen[before:]) == [0, 1, 2, 3]


@needs_linux
def test_afterwards_the_system_chooses_again():
    cpu = fast_cpu.FastCpu(0, 1)
    assert cpu.settle() > 0
    cpu.release()
    assert len(os.sched_getaffinity(0)) == len(cpu._all)


def test_it_measures_also_where_no_cpu_can_be_chosen(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    cpu = fast_cpu.FastCpu(0, 1)
    assert cpu.settle() > 0
    cpu.release()
