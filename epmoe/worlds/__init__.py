"""Worlds: the ranks that work together, all in one process or one rank a process, and their memory.

An ExpertParallel uses these members of a world:

| name | meaning |
|---|---|
| n_ranks, ranks | size of the world, also size(); the ranks of this process, ascending |
| lists | True: arguments and results are lists over `ranks`; False: they belong to the only rank |
| machine | the device machine on which the ranks of this process run |
| allocate(nbytes, name, regions) | SymmetricMemory: one allocation for each rank, and the peers' addresses; collective |
| barrier() | returns when all ranks have called it; collective |
| tell(value, timeout) | list with the value of every process of the world; collective |
| shmem | True: ranks of other p2p worlds can be reached, for use_shmem=True; missing or False: they cannot |
| connect(memory), disconnect(memory) | with shmem: begin and end puts between the ranks' allocations |
| stream_of(rank, fused) | the stream that orders a rank's work, or the one of its fused kernels |
| share(launch) | LaunchConfig of one rank's fused kernel; several ranks may share a device |
| launching(fused) | context of the launches of one call |
"""
