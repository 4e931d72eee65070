"""What every puzzle's kernel is given: where its memory lies, in a table at `params`.

The table is uint64: the number of ranks, then for each region its address on each rank. The simulator keeps a copy of
it in TABLES, so that looking something up costs no steps of a schedule.
"""

from epmoe.device import SIM, device_fn, load_u64, u64

TABLES = {}  # address of a table -> its numbers

if SIM:

    def region(params, number, rank):
        """The address of memory region `number` of a rank."""
        table = TABLES[params]
        if not 0 <= rank < table[0]:
            raise IndexError(f"there is no rank {rank}: ranks are 0 to {table[0] - 1}")
        return table[1 + number * table[0] + rank]

else:

    @device_fn
    def region(params, number, rank):
        """The address of memory region `number` of a rank."""
        n_ranks = load_u64(params)
        return load_u64(params + u64(8) * (u64(1) + u64(number) * n_ranks + u64(rank)))
