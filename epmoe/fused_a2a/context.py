"""ctx for those who call forward and backward themselves: any object with attributes will do, and this is one."""


class Context:
    """What forward leaves for backward; torch.autograd gives its own instead."""


def results(group, per_rank):
    """What a function returns: a list over ranks for a LocalWorld, else this rank's own."""
    return list(per_rank) if group.lists else per_rank[0]


def columns(group, per_rank):
    """What a function returns where each rank has several results: of each a list over ranks, or this rank's own.

    None instead of a list of what no rank has.
    """
    if not group.lists:
        return per_rank[0]
    return [
        None if all(one is None for one in column) else list(column) for column in zip(*per_rank)
    ]
