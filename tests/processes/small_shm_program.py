"""One rank under mpirun on a host whose /dev/shm is as small as a container's: large memory is refused, small is not."""

from epmoe import EPConfig, ExpertParallel, MPIWorld, UnavailableError
from epmoe.worlds import shared_room

shared_room.room = lambda: (60 << 20, 64 << 20)
world = MPIWorld()
try:
    ExpertParallel(EPConfig(2, 4, 2, 4096, 2048), world)
except UnavailableError as error:
    print(f"rank {world.rank}: {error}", flush=True)
ExpertParallel(EPConfig(2, 4, 2, 16, 4), world).close()
print(f"rank {world.rank} went on", flush=True)
