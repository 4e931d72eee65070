"""Compares a dict over all ranks, and names the fields and ranks that differ."""

from epmoe_ref.errors import EPValueError


def same(what, by_rank):
    """Raise EPValueError, naming fields, values and ranks, unless the dicts of all ranks are equal."""
    differing = differences(dict(enumerate(by_rank)))
    if differing:
        raise EPValueError(f"{what} differs between ranks: {differing}. Give every rank the same")


def differences(by_rank):
    """The fields that differ, with values and ranks, as text; "" if there are none. by_rank: {rank: dict}."""
    lines = []
    for name in dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank):
        ranks_with = {}
        for rank, of_rank in by_rank.items():
            ranks_with.setdefault(repr(of_rank.get(name)), []).append(rank)
        if len(ranks_with) == 1:
            continue
        lines.append(
            f"{name} is "
            + ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_with.items())
        )
    return "; ".join(lines)
