"""The simulator: the device layer's words on a CPU, for all blocks of all virtual ranks at once.

words <- plain_ops, strong_ops, id_ops, shared, warp, hopper: what a word does, in the table of ops
scheduler: who runs next, waiting, hangs                     livelock: waiting loops that never park
memory: buffers, bounds, names for reports                   threads, run: launches, blocks, residency
machine: the host's side (buffers, streams, launches)        network: SHMEM between p2p worlds
actors, accesses, detector, async_proxy, network_agents, race_report: data races
recorder: every operation written down, for pictures and traces

What the race detector guarantees, and what it cannot see: docs/checking.md.
"""
