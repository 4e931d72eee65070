"""The last calls of a Buffer, which ranks compare when a wait has expired: did they make the same calls?"""

from epmoe.worlds.agreement import differences

MOST_CALLS = 32
PATIENCE_S = 2.0  # ranks that wait for each other give up at about the same time


def compared(recent, world, timeout):
    """After a wait has expired: in what the ranks' calls differ, in words; waits a little for the other ranks.

    recent: [(number, what the call was given)] of this rank's latest calls, numbered alike on all ranks.
    """
    if world.lists:
        return ""
    of_ranks = world.hear(dict(recent), min(timeout, PATIENCE_S))
    for number in sorted(set.intersection(*map(set, of_ranks.values()))):
        given = {rank: known[number] for rank, known in of_ranks.items()}
        differing = differences(given)
        if differing:
            calls = {facts["call"] for facts in given.values()}
            what = (
                f"gave {calls.pop()} different sizes" if len(calls) == 1 else "made different calls"
            )
            return f". The ranks {what}: {differing}. Make the same calls on every rank, with the same sizes"
    if len(of_ranks) == world.n_ranks:
        return ""
    return f". This rank called {as_called(recent[-1][1])}: do all ranks make the same calls, with the same sizes?"


def as_called(facts):
    """A call and what it was given, in words."""
    call, *given = (
        f"{name}={value!r}" if name != "call" else value for name, value in facts.items()
    )
    return f"{call} with {', '.join(given) or 'nothing'}"
