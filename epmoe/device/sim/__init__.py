"""The simulator: the device layer's words on a CPU, for all blocks of all virtual ranks at once.

words <- plain_ops, strong_ops, id_ops, shared, warp, hopper: what a word does, in the table of ops
scheduler: who runs next, waiting, hangs
memory: buffers, bounds, names for reports                   threads, run: launches, blocks, residency
machine: the host's side (buffers, streams, launches)        network: SHMEM between p2p worlds
accesses, detector, async_proxy, network_agents, race_report: data races
recorder: every operation written down, for pictures and traces

What the race detector cannot see: code that did not run; an order that held by luck in every explored schedule;
mistakes among strong operations only, except in stale mode (fence.sc is not modelled, atomics always read the newest
value); what a compiler does to plain accesses; bulk stores issued by several lanes of one warp, which it takes for
one; what the host does through Buffer.array and arrays of its own.
"""
