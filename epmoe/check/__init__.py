"""Compares any implementation of dispatch and combine with the reference, and explains every difference.

Ten lines connect an implementation (a library, a kernel, a NumPy sketch):

    # mine.py
    from epmoe.check import Implementation
    import my_library

    class Mine(Implementation):
        def dispatch(self, input_tokens, topk_ids):
            rows, offsets, info = my_library.dispatch(input_tokens, topk_ids, self.cfg.n_experts)
            return [dict(output_tokens=r, row_offsets=o, src_info=i) for r, o, i in zip(rows, offsets, info)]
        def combine(self, expert_outputs, dispatched, router_weights):
            return my_library.combine(expert_outputs, [d["src_info"] for d in dispatched], router_weights)

    $ epmoe check mine:Mine            # a table of cases, PASS or FAIL
    $ python -m pytest --epmoe-check mine:Mine   # one test a case

Arguments and results are lists over ranks of NumPy arrays. With `per_rank = True`, under mpirun or torchrun, they are
this rank's arrays. Class attributes declare the supported formats and options (`Implementation`). `RowsImplementation`
does the same for the rows of Megatron's fused_a2a, and `HybridImplementation` for its HybridEP. Both may have
gradients. `compare_dispatched` and `compare_combined` compare two results without running anything.

With 4 ranks the first round of each case is the golden vector with the same name (`epmoe vectors DIR`).

Results are compared bit for bit, so do not use it for an implementation whose sums are only approximate.
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
        raise AttributeError(f"module 'epmoe.check' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return [*globals(), *__all__]  # so that help() shows them
