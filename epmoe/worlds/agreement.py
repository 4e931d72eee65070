"""Do all ranks say the same? If not, which field differs, and on which ranks."""

from dataclasses import fields

from epmoe_ref.errors import EPValueError


def fields_of(cfg) -> dict:
    """The fields of a dataclass by name."""
    return {f.name: getattr(cfg, f.name) for f in fields(cfg)}


def same(what, by_rank):
    """Raise EPValueError unless the dicts of all ranks are equal, naming fields, values, ranks."""
    differing = [
        name
        for name in by_rank[0]
        if any(of_rank.get(name) != by_rank[0][name] for of_rank in by_rank)
    ]
    if not differing:
        return
    lines = []
    for name in differing:
        ranks_with = {}
        for rank, of_rank in enumerate(by_rank):
            ranks_with.setdefault(repr(of_rank.get(name)), []).append(rank)
        lines.append(
            f"{name} is "
            + ", ".join(
                f"{value} on rank {', '.join(map(str, ranks))}"
                for value, ranks in ranks_with.items()
            )
        )
    raise EPValueError(
        f"{what} differs between ranks: {'; '.join(lines)}. Give every rank the same"
    )
