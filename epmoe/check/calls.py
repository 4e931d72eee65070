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
        """Note that a call begins. tell, if there is one, gets the call and its round."""
        self.call, self.round = call, None if round_ is None else round_ + 1
        if self.tell:
            self.tell(self.call, self.round)

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


class Calls:
    """Calls the functions of one object of an implementation, with lists over ranks. round: counted from 0."""

    def __init__(self, implementation, ranks):
        self.per_rank, self.ranks, self.round = implementation.per_rank, ranks, 0

    @np.errstate(all="ignore")  # some cases have NaN and overflow on purpose
    def __call__(self, function, arguments, *more, **options):
        """(results, differences) of one call. differences: the arguments that were written to.

        arguments: {name: list over ranks, or None}, given as copies. With one rank a process the function gets that
        rank's entries, also of lists in options. more: passed unchanged.
        """
        given = {name: None if of is None else [_copy(a) for a in of] for name, of in arguments.items()}
        name, values = getattr(function, "__name__", "a call"), tuple(given.values())
        progress.begin(name, self.round)
        if self.per_rank:
            (rank,) = self.ranks.here
            values, options = _own(values, rank), {name: _own(value, rank) for name, value in options.items()}
        results = function(*values, *more, **options)
        progress.begin(f"the comparison after {name}", self.round)
        changed = [
            Difference(name, "was written to", rank=rank, rule="inputs are read only")
            for name, of in arguments.items()
            for rank in self.ranks.here
            if of is not None and isinstance(of[rank], np.ndarray) and of[rank].tobytes() != given[name][rank].tobytes()
        ]
        return results, changed

    def over_ranks(self, what, result, of="arrays", optional=False):
        """A result as a list over all ranks, None for those of other processes. An optional one may be None.

        Errors: WrongForm if it is not one for each rank. of: what the list should hold.
        """
        if result is None and optional:
            return None
        if self.per_rank:
            return [result if rank in self.ranks.here else None for rank in range(self.ranks.size)]
        return listed(what, result, self.ranks.size, of)

    def each(self, compare):
        """A function that returns the differences of compare(rank) over the ranks of this process."""
        return lambda: [d for rank in self.ranks.here for d in compare(rank)]


def _copy(value):
    return value.copy() if isinstance(value, np.ndarray) else value


def _own(value, rank):
    """A value for this rank: lists over ranks are replaced by its entry, also inside a tuple."""
    if isinstance(value, tuple):
        return tuple(_own(entry, rank) for entry in value)
    return value[rank] if isinstance(value, list) else value


def parts(what, results, names):
    """The results of a call that returns several, in the order of `names`. Errors: WrongForm if there are not as many."""
    if isinstance(results, (list, tuple)) and len(results) == len(names):
        return results
    raise WrongForm(what, results, f"{len(names)} results are needed: {', '.join(names)}")


def listed(what, results, n_ranks, of):
    """Results as a list over the ranks. Errors: WrongForm."""
    if hasattr(results, "__iter__") and not isinstance(results, (dict, str, bytes)):
        results = list(results)
    if not isinstance(results, list) or len(results) != n_ranks:
        raise WrongForm(what, results, f"a list over the {n_ranks} ranks is needed, of {of}")
    return results


def first_found(implementation, case, ranks, steps, *cfg):
    """The differences of the first call after which some rank has any; [] if there are none.

    steps(world, call, round number): yields for each call of `call` (Calls) differences that are known, and a function
    that returns those of the results. It is called again at the end, in case a later call changed a result.
    """
    later = []
    with made(implementation, *cfg) as world:
        call = Calls(implementation, ranks)
        for call.round in range(case.rounds):
            of_round = steps(world, call, call.round)
            while step := _next_step(of_round):
                found, compare = step
                if any(ranks.gather(bool(found))):
                    return [d.in_round(call.round) for d in found]
                later.append((call.round, compare))
        return [d.in_round(round_).because(LATER) for round_, compare in later for d in compare()]


def _next_step(of_round):
    """(differences after the next call, the function that compares its results again); None after the last call."""
    try:
        for found, compare in of_round:
            return found + compare(), compare
    except WrongForm as wrong:
        return [wrong.difference], None
    return None
