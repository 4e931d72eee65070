"""Calls functions of fused_a2a implementations with copies of all arrays, and checks that they do not change them."""

import numpy as np

from epmoe.check.difference import Difference

LATER = (
    "it was equal when it was returned, and was changed by a later call: is its memory used again?"
)


@np.errstate(all="ignore")  # some cases have NaN and overflow on purpose
def call(implementation, ranks, function, arguments, *more, **options):
    """(results, differences) of one call.

    arguments: {name: list over ranks, or None}. With one rank a process the function gets that rank's entry.
    more, options: passed unchanged. differences: the arguments that were written to.
    """
    given = {
        name: None if of is None else [np.array(a) for a in of] for name, of in arguments.items()
    }
    if implementation.per_rank:
        (rank,) = ranks.here
        own = [None if of is None else of[rank] for of in given.values()]
        results = function(*own, *more, **options)
    else:
        results = function(*given.values(), *more, **options)
    changed = [
        Difference(name, "was written to", rank=rank, rule="inputs are read only")
        for name, of in arguments.items()
        if of is not None
        for rank in ranks.here
        if np.ascontiguousarray(of[rank]).tobytes()
        != np.ascontiguousarray(given[name][rank]).tobytes()
    ]
    return results, changed


def over_ranks(implementation, ranks, result):
    """One result, indexed by [rank]; None if there is none."""
    if result is None:
        return None
    return {ranks.here[0]: result} if implementation.per_rank else result


def first_found(implementation, case, ranks, steps):
    """The differences of the first step where some rank has any; [] if there are none.

    steps(world, case, ranks, round number): yields for each call the differences of arguments that were written to, and
    a function of a rank that compares its results. It is called again at the end, in case a later call changed a result.
    """

    def all_of(compare):
        return [d for rank in ranks.here for d in compare(rank)]

    world, later = implementation.make(), []
    try:
        for round_ in range(case.rounds):
            for changed, compare in steps(world, case, ranks, round_):
                found = changed + all_of(compare)
                if any(ranks.gather(bool(found))):
                    return [d.in_round(round_) for d in found]
                later.append((round_, compare))
        return [d.in_round(round_).because(LATER) for round_, one in later for d in all_of(one)]
    finally:
        world.close()
