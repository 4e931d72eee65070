"""The host side of dispatch and combine: everything around the kernels.

ExpertParallel (epmoe/expert_parallel.py) consists of these modules; epmoe.fused_a2a uses some of them.

arrays, dlpack: the caller's arrays, and result arrays        inputs: checks arguments before anything is launched
placing: puts the caller's arrays where kernels can read      user_functions: epilogue, weights, scale as functions
memory_pool: memory for results; out_arrays: out= arrays      dispatched: the result of dispatch
rank_memory: a rank's regions and results, and their bytes    rounds: the order of calls
dispatch_phase, combine_phase, silu_phase: check all ranks, place arrays, launch, return results
engine: shared by the phases, with plans and the open round   plain_kernels: runs the plain kernels for the phases
compiling: compiles kernels in many processes
"""
