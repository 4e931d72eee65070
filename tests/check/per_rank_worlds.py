"""Implementations with one rank a process: the NumPy world, which gathers its inputs with MPI."""

from mpi4py import MPI
from numpy_world import NumpyWorld

COMM = MPI.COMM_WORLD


class OneRank(NumpyWorld):
    per_rank = True

    def dispatch(self, input_tokens, topk_ids):
        return super().dispatch(COMM.allgather(input_tokens), COMM.allgather(topk_ids))[COMM.rank]

    def combine(self, expert_outputs, dispatched, router_weights):
        weights = None if router_weights is None else COMM.allgather(router_weights)
        return super().combine(COMM.allgather(expert_outputs), COMM.allgather(dispatched), weights)[COMM.rank]


class OneRankWrong(OneRank):
    """Only rank 1 is wrong; the others must not wait for it for ever."""

    def weights(self, weights):
        return weights * weights if COMM.rank == 1 else weights
