"""Who the peers are and whose memory is whose: one process with all ranks, or one rank a process.

What an ExpertParallel asks of a world:

| name | meaning |
|---|---|
| n_ranks, ranks | size of the world, also size(); the ranks of this process, ascending |
| lists | True: arguments and results are lists over `ranks`; False: there is one rank, and they are its own |
| machine | the device machine on which the ranks of this process run |
| allocate(nbytes, name, regions) | SymmetricMemory: one allocation a rank, and the peers' addresses; collective |
| barrier() | returns when all ranks have come; collective |
| tell(value, timeout) | list with the value of every process of the world; collective |
| shmem | True: ranks of other p2p worlds can be reached, for use_shmem=True; missing or False: not here |
| connect(memory), disconnect(memory) | with shmem: let puts go between the ranks' allocations, and no more |
| stream_of(rank) | the stream by which a rank's work is ordered |
| share(launch) | LaunchConfig of one rank's fused kernel, where several ranks share a device |
| launching(fused) | context of the launches of one call, gives {rank: stream} |
"""
