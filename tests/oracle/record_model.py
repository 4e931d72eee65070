"""Dispatch and combine as a list of records: one Python loop over tokens and k, one record a message.

Written only from the text of the protocol. It is not vectorised, and shares nothing with the packages.
"""

from dataclasses import dataclass, field

import exact_float32 as f32
from exact_codes import OUTPUT_TYPES
from exact_formats import FACTS, align_up, encode_token, slot_byte, tile_byte

PADDING = "padding"
SHARED = "shared"


@dataclass
class World:
    """Sizes, options and inputs of all ranks. Numbers are bit patterns, so nothing is rounded."""

    n_ranks: int
    n_local_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    token_format: str
    tokens: list  # [rank][token][column], bf16 bits
    topk_ids: list  # [rank][token][k]
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    allreduce_world_size: int = 1
    fuse_a_scale_preshuffle: bool = False
    combine_dtype: str = "bf16"
    alignment: int = 16
    input_scale: list = None  # [rank], float32 bits
    routed_outputs: list = None  # [src_rank][token][k][column], bits of combine_dtype
    shared_outputs: list = None  # [rank][token][column], bits of combine_dtype
    weights: list = None  # [rank][token][k], float32 bits, or None
    epilogue: object = None  # (rank, token, column, number) -> number, in exact_float32's numbers
    name: str = "world"

    @property
    def n_experts(self):
        return self.n_ranks * self.n_local_experts

    def num_tokens(self, rank):
        return len(self.tokens[rank])

    def owner(self, expert):
        return expert // self.n_local_experts

    def shared_share(self, rank):
        """Tokens whose shared-expert row this rank computes."""
        t = self.num_tokens(rank)
        if not self.fused_shared_expert:
            return range(0)
        if not self.skip_a2a:
            return range(t)
        w = self.allreduce_world_size
        start = rank * (t // w) + min(rank, t % w)
        return range(start, start + (t + w - rank - 1) // w)

    def takes_part(self, rank, expert):
        """Whether this id of this rank's token sends a message (and gets one back)."""
        return expert != -1 and (not self.skip_a2a or self.owner(expert) == rank)


@dataclass
class Row:
    """One row of dispatch's output: its origin and its content."""

    group: int
    row_in_group: int
    src_rank: object  # a rank, SHARED or PADDING
    token: int
    slot: int
    code_bytes: bytes
    scale_bytes: bytes

    def __str__(self):
        if isinstance(self.src_rank, str):
            return f"{self.src_rank} row {self.row_in_group} of group {self.group}"
        return f"group {self.group}, src_rank {self.src_rank}, token {self.token}, slot {self.slot}"


@dataclass
class Received:
    """The result of dispatch on one rank."""

    rows: list = field(default_factory=list)
    row_offsets: list = field(default_factory=list)
    expert_ids: list = field(default_factory=list)
    recv_count: list = field(default_factory=list)  # [local_expert][src_rank]
    group_rows: list = field(default_factory=list)  # rows of each group, padding included
    scales_offset: list = None
    scale_bytes: dict = None  # byte in the scale array -> (value, Row or None); every byte defined on the device
    scale_size: int = 0


def dispatch(world):
    """list over ranks of Received."""
    facts = FACTS[world.token_format]
    encoded = {}  # (rank, token) -> code bytes, scale bytes
    messages = {}  # (destination rank, local expert, src_rank) -> [(token, k)]
    for rank in range(world.n_ranks):
        for token in range(world.num_tokens(rank)):
            g = f32.from_bits(world.input_scale[rank]) if world.input_scale else f32.ONE
            encoded[rank, token] = encode_token(world.token_format, world.tokens[rank][token], g)
            for slot in range(world.top_k):
                expert = world.topk_ids[rank][token][slot]
                if world.takes_part(rank, expert):
                    key = world.owner(expert), expert % world.n_local_experts, rank
                    messages.setdefault(key, []).append((token, slot))

    results = []
    for rank in range(world.n_ranks):
        received = Received(row_offsets=[0])
        groups = []
        if world.fused_shared_expert:
            groups.append([(SHARED, token, -1) for token in world.shared_share(rank)])
        for local_expert in range(world.n_local_experts):
            sources = [rank] if world.skip_a2a else range(world.n_ranks)
            segments = [messages.get((rank, local_expert, source), []) for source in sources]
            received.recv_count.append([len(segment) for segment in segments])
            groups.append(
                [(source, token, slot) for source, segment in zip(sources, segments) for token, slot in sorted(segment)]
            )
        for group, entries in enumerate(groups):
            received.expert_ids.append(group)
            padded = align_up(len(entries), facts.pad_rows)
            entries = entries + [(PADDING, -1, -1)] * (padded - len(entries))
            for row_in_group, (source, token, slot) in enumerate(entries):
                if source == PADDING:
                    content = (b"", b"")
                else:
                    content = encoded[rank if source == SHARED else source, token]
                received.rows.append(Row(group, row_in_group, source, token, slot, *content))
            received.row_offsets.append(received.row_offsets[-1] + padded)
            received.group_rows.append(padded)
        place_scales(world, received)
        results.append(received)
    return results


def place_scales(world, received):
    """Fill scales_offset, scale_bytes and scale_size from the rows."""
    facts = FACTS[world.token_format]
    if facts.group == 0:
        return
    columns = world.hidden // facts.group
    total_rows = received.row_offsets[-1]
    places = received.scale_bytes = {}
    if facts.tiles:
        first_tiles, tiles = [], 0
        for rows in received.group_rows:
            first_tiles.append(tiles)
            tiles += -(-rows // 128)
        received.scales_offset = [first - received.row_offsets[group] // 128 for group, first in enumerate(first_tiles)]
        received.scale_size = tiles * 128 * columns
        # rows past the count in touched tiles
        places.update(dict.fromkeys(range(received.scale_size), (0, None)))
    elif world.token_format == "fp8_blockwise":
        received.scale_size = total_rows * columns * 4
    elif world.fuse_a_scale_preshuffle:
        capacity = world.n_ranks * world.max_tokens_per_rank
        received.scale_size = len(received.group_rows) * align_up(capacity, 32) * columns
    else:
        received.scale_size = total_rows * columns
    for row, record in enumerate(received.rows):
        if record.src_rank == PADDING:
            continue
        for column in range(columns):
            value = record.scale_bytes[column * facts.scale_bytes : (column + 1) * facts.scale_bytes]
            if facts.tiles:
                at = tile_byte(first_tiles[record.group], record.row_in_group, column, world.hidden, facts.group)
            elif world.token_format == "fp8_blockwise":
                at = (column * total_rows + row) * 4
            elif world.fuse_a_scale_preshuffle:
                at = slot_byte(record.group, record.row_in_group, column, world.hidden, capacity)
            else:
                at = row * columns + column
            for offset, byte in enumerate(value):
                places[at + offset] = byte, record


def combine(world):
    """list over ranks of the output as bits of combine_dtype.

    With weights [token][column]; without [token][k][column].
    """
    kind = OUTPUT_TYPES[world.combine_dtype]
    return [_combine_rank(world, rank, kind) for rank in range(world.n_ranks)]


def _combine_rank(world, rank, kind):
    share = world.shared_share(rank)
    out = []
    for token in range(world.num_tokens(rank)):
        slots = [k for k in range(world.top_k) if world.takes_part(rank, world.topk_ids[rank][token][k])]
        if world.weights is None:
            zero_row = [0] * world.hidden
            out.append(
                [list(world.routed_outputs[rank][token][k]) if k in slots else zero_row for k in range(world.top_k)]
            )
            continue
        sums = [0] * world.hidden
        for k in slots:
            w = f32.from_bits(world.weights[rank][token][k])
            row = world.routed_outputs[rank][token][k]
            sums = [f32.fma(w, kind.from_bits(bits), acc) for bits, acc in zip(row, sums)]
        row = [kind.to_bits(acc) for acc in sums]
        if world.fused_shared_expert:
            # rows outside the share add 0, which turns -0 into +0
            shared = (
                [kind.from_bits(b) for b in world.shared_outputs[rank][token]] if token in share else [0] * world.hidden
            )
            row = [kind.to_bits(f32.add(kind.from_bits(bits), s)) for bits, s in zip(row, shared)]
        if world.epilogue is not None:
            row = [
                kind.to_bits(world.epilogue(rank, token, column, kind.from_bits(bits)))
                for column, bits in enumerate(row)
            ]
        out.append(row)
    return out
