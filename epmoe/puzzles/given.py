"""What every puzzle's kernel is given: where its memory lies, in a table at `params`."""

from epmoe.device import device_fn, load_u64, u64


@device_fn
def region(params, number, rank):
    """The address of memory region `number` of a rank."""
    n_ranks = load_u64(params)
    return load_u64(params + u64(8) * (u64(1) + u64(number) * n_ranks + u64(rank)))
