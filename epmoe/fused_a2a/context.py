"""ctx for those who call forward and backward themselves: any object with attributes will do, and this is one."""


class Context:
    """What forward leaves for backward; torch.autograd gives its own instead."""


def results(group, per_rank):
    """What a function returns: a list over ranks for a LocalWorld, else this rank's own."""
    return list(per_rank) if group.lists else per_rank[0]


def columns(group, per_rank):
    """What a function returns where each rank has several results: of each a list over ranks, or this rank's own."""
    return [list(column) for column in zip(*per_rank)] if group.lists else per_rank[0]


def optional_results(group, per_rank):
    """As results, and None if no rank has any."""
    if not group.lists:
        return per_rank[0]
    return None if all(one is None for one in per_rank) else list(per_rank)
