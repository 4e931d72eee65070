"""All memory of one rank of a soak, in one buffer: its inputs, its results, and the memory of the checks."""

import ml_dtypes
import numpy as np

from epmoe.host.arrays import first, to_numpy
from epmoe.host.inputs import COMBINE_DTYPE
from epmoe.host.memory_pool import Arrangement, MemoryPool
from epmoe.host.rank_memory import combine_arrays, dispatch_arrays
from epmoe.kernels import formats
from epmoe.kernels.params import ParameterBlock
from epmoe.soak import errors

BF16 = np.dtype(ml_dtypes.bfloat16)
RESULTS = "results"  # the field of the block where dispatch's and combine's results begin
AGAIN = "again"  # prefix of the names of the output arrays that the soak fills itself


def is_encoded(cfg):
    """Whether output rows differ from the tokens, so that the soak must encode and decode every row again."""
    return cfg.token_format != "bf16"


def shapes(cfg):
    """({name: (shape, dtype)} of inputs and counts, the same for results and expert outputs)."""
    outputs, rows = dispatch_arrays(cfg)
    outputs.pop("topk_ids")  # the cleaned ids stay with the dispatch
    segments = cfg.n_local_experts * cfg.n_ranks
    pairs = cfg.n_ranks * cfg.max_tokens_per_rank * cfg.top_k
    tokens = cfg.max_tokens_per_rank
    inputs = {
        "x": ((tokens, cfg.hidden), BF16),
        "ids": ((tokens, cfg.top_k), np.int32),
        "weights": ((tokens, cfg.top_k), np.float32),
        "errors": ((errors.WORDS,), np.int32),
        "counts": ((segments,), np.int32),
        "starts": ((segments + 1,), np.int32),
        "seen": ((-(-pairs // 32),), np.uint32),
    }
    results = outputs | {
        "combined": combine_arrays(cfg, True)["output_tokens"],
        "y": ((rows, cfg.hidden), COMBINE_DTYPE[cfg.combine_dtype]),
    }
    if is_encoded(cfg):
        fmt = formats.of(cfg)
        inputs |= {"tokens": ((rows, cfg.hidden), BF16), "payloads": ((rows, fmt.token_size), np.uint8)}
        results |= {f"{AGAIN} {name}": outputs[name] for name in fmt.output_fields}
    return inputs, results


def parameter_block(cfg) -> ParameterBlock:
    """The addresses for a soak's kernels: every array's, and the start and end of the results."""
    inputs, results = shapes(cfg)
    return ParameterBlock(
        *((name, 1) for name in (*inputs, *results)),
        (RESULTS, 1),
        ("results_end", 1),
        (AGAIN, len(formats.of(cfg).output_fields) + 1),
    )


class RankArrays:
    """The arrays of one rank, each made once, and the parameter block with their addresses."""

    def __init__(self, cfg, machine, rank):
        inputs, results = shapes(cfg)
        self.cfg, self.rank = cfg, rank
        self._arena = MemoryPool(machine, rank)
        self._loan = self._arena.lend(Arrangement("soak", inputs | results, is_exact=True))
        self.results = tuple(results)
        addresses = {name: self._loan.address(name) for name in (*inputs, *results)}
        end = self._loan.base + self._loan.nbytes
        fmt, capacity = formats.of(cfg), results["y"][0][0]
        handler = [addresses.get(f"{AGAIN} {name}", 0) for name in fmt.output_fields]
        words = parameter_block(cfg).pack(
            addresses | {RESULTS: addresses[self.results[0]], "results_end": end, AGAIN: [*handler, capacity]}
        )
        self.parameters = machine.alloc(words.nbytes, "soak parameters", rank)
        self.parameters.write(words)
        field = self._loan.fields["errors"]
        self._loan.buffer.write(np.zeros(field.shape, field.dtype), field.offset)
        self._arrays = {(name, None): self._loan.array(name) for name in (*inputs, *results)}

    def array(self, name):
        """An array in the form that ExpertParallel takes."""
        return self._arrays[name, None]

    def first(self, name, n):
        """The first n entries of an array."""
        if (name, n) not in self._arrays:
            self._arrays[name, n] = first(self.array(name), n)
        return self._arrays[name, n]

    def named(self, names):
        """{name: the result array with that name, or None if the format has none}."""
        return {name: self.array(name) if name in self.results else None for name in names}

    def found(self):
        """The kernels' findings so far. Waits for the kernels."""
        self._arena.machine.synchronize()
        return errors.found(self.rank, to_numpy(self.array("errors")))

    def free(self):
        """Free the memory. The kernels must have ended."""
        self.parameters.free()
        self._arena.close()
        self._arrays, self._loan = {}, None
