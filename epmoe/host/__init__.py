"""The host's side of dispatch and combine: everything around the kernels that is no kernel.

An ExpertParallel (epmoe/expert_parallel.py) is put together from these; the rows of epmoe.fused_a2a use some of them.

arrays, dlpack: the caller's arrays, and ours for the caller       inputs: what is refused before anything is launched
placing: where kernels find the caller's arrays                    user_functions: epilogue, weights, scale as functions
memory_pool: memory that results lie in; results: the caller's (out=)  dispatched: what dispatch returns
rank_memory: a rank's regions and results, and their bytes         rounds: the order of calls
dispatch_phase, combine_phase, silu_phase: check all ranks, place, launch, hand out; engine: what they share, plans and the open
round among it; plain_kernels: the plain kernels for them
compiling: kernels compiled by many processes
"""
