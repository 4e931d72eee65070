"""For lesson 7: the routing of the reader's own model, from a file."""

import numpy as np

from epmoe.routing import guessed_experts
from epmoe.routing_report import dump
from epmoe_ref.errors import EPValueError

INPUT = None  # the file that `epmoe lesson 7 --input` names


def read(file, n_ranks=4):
    """(int ids (tokens, top_k) of all steps, n_experts) of a dump that `epmoe routing` reads.

    n_experts is the file's, or the least multiple of n_ranks that holds all ids. Errors: as in `epmoe routing`; also an
    n_experts that n_ranks does not divide.
    """
    found = dump.read(file)
    ids = np.concatenate(found.steps)
    n_experts = found.n_experts or guessed_experts(found.steps, n_ranks)[0]
    if n_experts % n_ranks:
        raise EPValueError(
            f"{file} has n_experts={n_experts}, which the lesson's {n_ranks} ranks do not divide: `epmoe routing "
            f"{file} --ranks N` takes other numbers of ranks"
        )
    found.check(n_experts)
    if not (ids >= 0).any():
        raise EPValueError(f"{file} holds no pair: every id is -1 or there is no token")
    return ids, n_experts
