"""How many bytes each buffer of a rank takes: what a configuration will need, and what an ExpertParallel holds."""

from typing import NamedTuple

from epmoe import layout
from epmoe.host.rank_memory import results
from epmoe_ref.config import EPConfig


class Use(NamedTuple):
    """One buffer of a rank: bytes that the configuration plans for it, and bytes allocated now."""

    buffer: str
    planned_bytes: int
    allocated_bytes: int


class MemoryTable(list):
    """Rows of `Use`; prints as a table. Results are planned once each; more in use at a time take more."""

    @property
    def planned_bytes(self):
        """Sum of what the configuration plans."""
        return sum(row.planned_bytes for row in self)

    @property
    def allocated_bytes(self):
        """Sum of what is allocated."""
        return sum(row.allocated_bytes for row in self)

    def __str__(self):
        rows = [*self, Use("total", self.planned_bytes, self.allocated_bytes)]
        lines = [f"{'bytes of one rank':26}{'planned':>16}{'allocated':>16}"]
        return "\n".join(lines + [f"{b:26}{planned:>16,}{now:>16,}" for b, planned, now in rows])


def plan(cfg: EPConfig) -> MemoryTable:
    """What one rank of this configuration needs, before anything is allocated."""
    regions, total = layout.regions(cfg), layout.total_bytes(cfg)
    rows = [Use(r.name, r.nbytes, 0) for r in regions]
    rows.append(Use("alignment of regions", total - sum(r.nbytes for r in regions), 0))
    return MemoryTable(rows + [Use(result.name, result.nbytes, 0) for result in results(cfg)])


def held(cfg: EPConfig, rank_memory, staging_bytes) -> MemoryTable:
    """The same with what one rank holds now."""
    of_results = dict.fromkeys([result.name for result in results(cfg)], 0)
    of_results |= rank_memory.arena.bytes_by_name
    rows = [
        row._replace(allocated_bytes=of_results.get(row.buffer, row.planned_bytes))
        for row in plan(cfg)
    ]
    return MemoryTable([*rows, Use("staged host arrays", 0, staging_bytes)])
