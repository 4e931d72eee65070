"""Calls functions of implementations: what each returns must have the right form, and must not change its arguments."""

import contextlib

import numpy as np

from epmoe.check.difference import Difference

LATER = "it was equal when it was returned, and was changed by a later call: is its memory used again?"


class WrongForm(Exception):
    """A call returned something that cannot be compared. `difference` says what, and what is needed."""

    def __init__(self, what, returned, needed):
        self.difference = Difference(what, f"returned {_told(returned)}; {needed}")
        super().__init__(f"{what} {self.difference.says}")


def _told(value):
    if isinstance(value, (list, tuple)):
        return f"{len(value)} result{'s' * (len(value) != 1)}"
    if isinstance(value, dict):
        return "a dict"
    shape = getattr(value, "shape", None)
    return f"{value!r:.60}" if shape is None else f"an array of shape {tuple(shape)}"


class Progress:
    """The call that was begun last, and its round (counted from 1), for reports on exceptions and hangs."""

    call, round, tell = "", None, None

    def begin(self, call, round_=None):
        """Note that a call begins. tell, if there is one, gets `str(self)`."""
        self.call, self.round = call, None if round_ is None else round_ + 1
        if self.tell:
            self.tell(str(self))

    def __str__(self):
        return self.call + (f" of round {self.round}" if self.round and self.call else "")


progress = Progress()


@contextlib.contextmanager
def made(implementation, *cfg):
    """The object of one world. It is closed at the end.

    After an exception with one rank a process it is not closed: the other ranks would not take part.
    """
    progress.begin("make")
    world = implementation.make(*cfg)
    if not hasattr(world, "close"):
        raise WrongForm("make", world, f"an object of {implementation.__name__} is needed")
    try:
        yield world
    except BaseException:
        if not implementation.per_rank:
            with contextlib.suppress(Exception):
                world.close()
        raise
    progress.begin("close")
    world.close()


@np.errstate(all="ignore")  # some cases have NaN and overflow on purpose
def call(implementation, ranks, function, arguments, *more, round_=None, **options):
    """(results, differences) of one call.

    arguments: {name: list over ranks, or None}. With one rank a process the function gets that rank's entry.
    more, options: passed unchanged. differences: the arguments that were written to.
    """
    given = {name: None if of is None else [np.array(a) for a in of] for name, of in arguments.items()}
    name = getattr(function, "__name__", "a call")
    progress.begin(name, round_)
    if implementation.per_rank:
        (rank,) = ranks.here
        own = [None if of is None else of[rank] for of in given.values()]
        results = function(*own, *more, **options)
    else:
        results = function(*given.values(), *more, **options)
    progress.begin(f"the comparison after {name}", round_)
    changed = [
        Difference(name, "was written to", rank=rank, rule="inputs are read only")
        for name, of in arguments.items()
        if of is not None
        for rank in ranks.here
        if np.ascontiguousarray(of[rank]).tobytes() != np.ascontiguousarray(given[name][rank]).tobytes()
    ]
    return results, changed


def parts(what, results, names):
    """The results of a call that returns several, in the order of `names`. Errors: WrongForm if there are not as many."""
    if isinstance(results, (list, tuple)) and len(results) == len(names):
        return results
    raise WrongForm(what, results, f"{len(names)} results are needed: {', '.join(names)}")


def over_ranks(implementation, ranks, what, result, optional=False):
    """One result, indexed by [rank]; None if there is none. Errors: WrongForm if it is not one for each rank."""
    if result is None and optional:
        return None
    if implementation.per_rank:
        return {ranks.here[0]: result}
    return listed(what, result, ranks.size, "arrays")


def listed(what, results, n_ranks, of):
    """Results as a list over the ranks. Errors: WrongForm."""
    if hasattr(results, "__iter__") and not isinstance(results, (dict, str, bytes)):
        results = list(results)
    if not isinstance(results, list) or len(results) != n_ranks:
        raise WrongForm(what, results, f"a list over the {n_ranks} ranks is needed, of {of}")
    return results


def first_found(implementation, case, ranks, steps):
    """The differences of the first step where some rank has any; [] if there are none.

    steps(world, case, ranks, round number): yields for each call the differences of arguments that were written to, and
    a function of a rank that compares its results. It is called again at the end, in case a later call changed a result.
    """

    def all_of(compare):
        return [d for rank in ranks.here for d in compare(rank)]

    later = []
    with made(implementation) as world:
        for round_ in range(case.rounds):
            of_round = steps(world, case, ranks, round_)
            while step := _next_step(of_round, all_of):
                changed, compare, found = step
                if any(ranks.gather(bool(changed + found))):
                    return [d.in_round(round_) for d in changed + found]
                later.append((round_, compare))
        return [d.in_round(round_).because(LATER) for round_, one in later for d in all_of(one)]


def _next_step(of_round, all_of):
    """(differences of arguments, the function that compares, what it finds) of the next call; None after the last."""
    try:
        for changed, compare in of_round:
            return changed, compare, all_of(compare)
    except WrongForm as wrong:
        return [wrong.difference], None, []
    return None
