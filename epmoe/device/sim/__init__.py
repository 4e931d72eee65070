"""The simulator. It runs the intrinsics on a CPU, for all blocks of all virtual ranks at once.

plain_ops, strong_ops, id_ops, shared, warp, hopper: the intrinsics, registered in the table of ops
scheduler: picks the next thread, waiting, hangs             livelock: waiting loops that never park
memory: buffers, bounds, names for reports                   threads, run: launches, blocks, residency
machine: the host's side (buffers, streams, launches)        network: SHMEM between p2p worlds
actors, accesses, detector, async_proxy, network_agents, race_report: data races
recorder: records every operation, for pictures and traces

docs/checking.md says what the race detector guarantees and what it cannot see.
"""
