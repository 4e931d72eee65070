"""Holds dispatch and combine, ours or anybody's, against the reference and says in its words what differs.

Ten lines connect an implementation (a library, a kernel, a NumPy sketch):

    # mine.py
    from epmoe.check import Implementation
    import my_library

    class Mine(Implementation):
        def dispatch(self, input_tokens, topk_ids):
            rows, offsets, info = my_library.dispatch(input_tokens, topk_ids, self.cfg.n_experts)
            return [dict(output_tokens=r, row_offsets=o, src_info=i) for r, o, i in zip(rows, offsets, info)]
        def combine(self, expert_outputs, dispatched, router_weights):
            return my_library.combine(expert_outputs, router_weights)

    $ epmoe check mine:Mine            # a table of cases, PASS or FAIL
    $ python -m pytest --epmoe-check mine:Mine   # one test a case

Arrays are NumPy arrays, lists over ranks; with `per_rank = True` this rank's own, under mpirun or torchrun. Class
attributes say which formats and options it serves (`Implementation`). `RowsImplementation` is the same for the rows of
Megatron's fused_a2a, `HybridImplementation` for its HybridEP; both may have gradients. `compare_dispatched`,
`compare_combined` compare two results without running anything.

With 4 ranks the first round of each case is the golden vector of that name (`epmoe vectors DIR`).

Who should not use it: an implementation whose sums are only nearly right. Equality here is to the bit.
"""

from importlib import import_module

# name -> the module that defines it; imported at first use, because pytest imports this package in every run
_HOME = {
    "Difference": "epmoe.check.difference",
    "HybridImplementation": "epmoe.check.implementation",
    "Implementation": "epmoe.check.implementation",
    "Outcome": "epmoe.check.conformance",
    "Report": "epmoe.check.conformance",
    "RowsImplementation": "epmoe.check.implementation",
    "check": "epmoe.check.conformance",
    "compare_combined": "epmoe.check.compare",
    "compare_combined_world": "epmoe.check.compare",
    "compare_dispatched": "epmoe.check.compare",
    "compare_dispatched_world": "epmoe.check.compare",
    "report": "epmoe.check.compare",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(
            f"module 'epmoe.check' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
