"""The memory of simulated ranks in processes: only files that a rank has made are mapped, and no map outlives its arrays."""

import gc
import os
import sys
from types import SimpleNamespace

import pytest

from epmoe import LocalWorld, UnavailableError
from epmoe.worlds.mapped_memory import MappedMemory, _mapped, _new_file

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the files have names until all ranks have mapped them"
)


def test_only_memory_that_a_rank_has_made_is_mapped(tmp_path):
    file, path = _new_file()
    # a killed rank leaves nothing
    assert path == f"/proc/{os.getpid()}/fd/{file}" and os.fstat(file).st_nlink == 0
    os.close(file)
    own = os.memfd_create("mine")
    os.truncate(own, 4096)
    assert len(_mapped(1, f"/proc/{os.getpid()}/fd/{own}", 4096)) == 4096
    named = tmp_path / "of somebody"
    named.write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(named)
    opened = os.open(named, os.O_RDWR)
    for path in (named, tmp_path / "link", f"/proc/{os.getpid()}/fd/{opened}", "/proc/self/mem", tmp_path / "nothing"):
        with pytest.raises(UnavailableError, match="rank 1"):
            _mapped(1, str(path), 4096)
    with pytest.raises(UnavailableError, match="it has 4096 bytes, 8192 were told"):
        _mapped(1, f"/proc/{os.getpid()}/fd/{own}", 8192)
    os.close(own), os.close(opened)


def maps():
    """How many of this process's maps are of such files."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:epmoe" in line for line in lines)


def test_a_map_ends_with_the_last_array_in_it():
    exchange = SimpleNamespace(gather=lambda occasion, value, timeout: [value])
    world = SimpleNamespace(rank=0, n_ranks=1, exchange=exchange, machine=LocalWorld(1).machine)
    before = maps()
    memory = MappedMemory(world, 1000, "memory", None, 1.0)
    array = memory.buffers[0].array("u1", 1000)
    memory.free(True, 1.0)
    del memory
    gc.collect()
    assert maps() == before + 1 and not (array - array).any()
    del array
    gc.collect()
    assert maps() == before
