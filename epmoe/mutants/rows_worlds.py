"""Worlds of the rows kernels."""

from dataclasses import replace

from epmoe.kernels.rows.shape import SMALL
from epmoe.mutants.world_kinds import RowsWorld


def tuned(**numbers):
    """Constants of a world, with these numbers in place of the simulator's own."""
    return {"rows.shape.SMALL": replace(SMALL, **numbers)}


ORDINARY = tuned(bits_experts=0)  # expert-major: a small batch uses the kernel for large ones
SIGNALS = tuned(lamport_tokens=0)  # every row uses signals

ROWS_WORLDS = (
    RowsWorld("rows", "rows"),
    RowsWorld(
        "rows of four ranks", "rows", tokens=(5, 0, 3, 2), top_k=6, hidden=264, shape=(2, 64)
    ),
    RowsWorld(
        "rows of five ranks", "rows", tokens=(2, 0, 1, 0, 1), top_k=9, hidden=8, shape=(2, 32)
    ),
    RowsWorld("rows, results through the staging area", "rows", full_heap=(1,)),
    RowsWorld(
        "rows, combines in a row",
        "rows",
        tokens=(0, 4),
        shape=(2, 32),
        combines=3,
        slow=(1,),  # rank 0 waits for none
        constants=SIGNALS,
    ),
    RowsWorld(
        "few rows, combines in a row", "rows", tokens=(0, 2), shape=(2, 32), combines=3, slow=(1,)
    ),
    RowsWorld("rows, counted on the device", "rows", on_device=True),
    RowsWorld("rows, bad ids", "rows", tokens=(9, 4), top_k=4, local=3, bad_ids=True),
    RowsWorld("rows, absent peer", "rows", absent=(1,)),
    RowsWorld("hybrid", "hybrid", limit=16, pad=4),  # rank 0's rows just fit
    RowsWorld("hybrid, several sending blocks", "hybrid", tokens=(5, 4), limit=20, shape=(6, 32)),
    RowsWorld(
        "hybrid, two p2p worlds",
        "hybrid",
        tokens=(4, 0, 3, 2),
        top_k=6,
        limit=24,
        shape=(2, 64),
        p2p_world_size=2,
        constants=ORDINARY,
    ),
    RowsWorld("rows in parts", "rows", tokens=(3, 2), hidden=1536, constants=SIGNALS),
    RowsWorld(
        "rows in parts, more than a window holds", "rows", tokens=(7, 1), hidden=1032, top_k=3
    ),
    RowsWorld(
        "rows, a token sent by several blocks",
        "rows",
        tokens=(2, 1),
        hidden=1200,
        shape=(12, 32),
        constants=SIGNALS,
    ),
    RowsWorld(
        "hybrid fp8, rows in parts",
        "hybrid",
        tokens=(2, 1),
        hidden=1280,
        limit=8,
        fp8=True,
        constants=ORDINARY,
    ),
    RowsWorld(
        "hybrid, rows in parts", "hybrid", tokens=(3, 2), hidden=2112, limit=10, constants=ORDINARY
    ),
    RowsWorld(
        "hybrid, more experts of a token than lanes",
        "hybrid",
        tokens=(1, 1),
        top_k=87,
        local=44,
        limit=90,
        hidden=8,
        shape=(2, 32),
        constants=ORDINARY,
    ),
    RowsWorld(
        "rows, ranks with more blocks than others",
        "rows",
        tokens=(9, 3),
        local=10,
        hidden=8,
        shape=(12, 32),
    ),
    RowsWorld(
        "rows, no room at first", "rows", tokens=(4, 3), shape=(8, 32), asks=True, constants=SIGNALS
    ),
    RowsWorld(
        "hybrid, no room at first", "hybrid", tokens=(4, 3), limit=16, asks=True, constants=ORDINARY
    ),
    RowsWorld(
        "rows, more tokens than lanes", "rows", tokens=(40, 33), top_k=1, hidden=8, shape=(2, 32)
    ),
    RowsWorld(
        "hybrid fp8, too little room", "hybrid", hidden=128, limit=9, fp8=True, shape=(2, 64)
    ),
    RowsWorld(
        "few rows, again in a row", "rows", tokens=(2, 0), shape=(2, 32), combines=3, slow=(1,)
    ),
    RowsWorld(
        "rows, fewer parts of more rows",
        "rows",
        tokens=(7, 5),
        hidden=1032,
        shape=(4, 32),
        brief=True,
        constants=tuned(useful_parts=10, return_parts=1),
    ),
    RowsWorld(
        "rows of ten ranks",
        "rows",
        tokens=(4, *[0] * 8, 1),
        top_k=9,
        local=1,
        hidden=8,
        shape=(2, 32),
        brief=True,
        constants=SIGNALS,
    ),
    RowsWorld(
        "rows in two parts, more blocks",
        "rows",
        tokens=(4, 3),
        hidden=1536,
        shape=(6, 32),
        dtype="float16",
        brief=True,
        constants=SIGNALS,
    ),
    RowsWorld(
        "hybrid, late experts and wide rows",
        "hybrid",
        tokens=(1, 1),
        top_k=4,
        local=70,
        limit=12,
        hidden=1032,
        shape=(2, 32),
        from_expert=64,
        constants=tuned(bits_experts=0, useful_parts=1, expand_parts=1),
    ),
    RowsWorld("few wide rows, few warps", "rows", tokens=(1, 2), hidden=1032, shape=(2, 32)),
    RowsWorld(
        "pairs of rows and scales", "rows", tokens=(5, 2), hidden=128, pairs=True, on_device=True
    ),
    RowsWorld(
        "rows, three choices",
        "rows",
        tokens=(24, 13),
        top_k=3,
        hidden=8,
        shape=(3, 32),
        dtype="float16",
        brief=True,
    ),
    RowsWorld(
        "few pairs of a late rank",
        "rows",
        tokens=(2, 1),
        hidden=128,
        pairs=True,
        on_device=True,
        slow=(0,),
    ),
    RowsWorld(
        "few pairs, stale loads",
        "rows",
        tokens=(1, 2),
        hidden=256,
        pairs=True,
        on_device=True,
        stale=True,
    ),
    RowsWorld("rows, stale loads", "rows", stale=True),
    RowsWorld("hybrid, stale loads", "hybrid", limit=16, pad=4, stale=True),
    RowsWorld("rows with stamps", "rows", id_dtype="int32", trace=True),
    RowsWorld(
        "few rows with stamps, late",
        "rows",
        tokens=(2, 1),
        shape=(3, 64),
        id_dtype="int32",
        trace=True,
        slow=(0,),
    ),
    RowsWorld("hybrid, absent peer", "hybrid", limit=16, absent=(1,)),
    RowsWorld(
        "hybrid with stamps, late",
        "hybrid",
        tokens=(4, 3),
        limit=18,
        trace=True,
        slow=(1,),
        dtype="float16",
        constants=ORDINARY,
    ),
    RowsWorld("rows in parts, late", "rows", tokens=(5, 2), hidden=1032, slow=(0,)),
    RowsWorld(
        "rows, 32 choices", "rows", tokens=(7, 1), top_k=32, local=17, hidden=8, shape=(3, 32)
    ),
    RowsWorld(
        "rows, many experts, two warps",
        "rows",
        tokens=(4, 3),
        top_k=9,
        local=20,
        hidden=8,
        constants=SIGNALS,
    ),
    RowsWorld(
        "hybrid, many experts, two warps",
        "hybrid",
        tokens=(3, 2),
        top_k=9,
        local=20,
        limit=40,
        hidden=8,
        constants=ORDINARY,
    ),
    RowsWorld(
        "rows, few dispatched between combines",
        "rows",
        tokens=(4, 3),
        shape=(3, 64),
        slow=(1,),
        between=True,
        constants=SIGNALS,
    ),
    RowsWorld(
        "rows of three choices, no memory left",
        "rows",
        tokens=(3, 3),
        top_k=3,
        full_heap=(0,),
        on_device=True,
        constants=SIGNALS,
    ),
    RowsWorld(
        "hybrid, more tokens than were promised",
        "hybrid",
        tokens=(5, 4),
        limit=20,
        shape=(8, 32),
        crowded=True,
    ),
    RowsWorld("hybrid, exact", "hybrid", tokens=(5, 4), limit=None, pad=4),
    RowsWorld("hybrid, exact, late", "hybrid", tokens=(3, 6), limit=None, shape=(6, 32), slow=(1,)),
    RowsWorld("hybrid, exact, no room at first", "hybrid", tokens=(4, 6), limit=None, asks=True),
    RowsWorld("hybrid fp8, exact", "hybrid", tokens=(5, 2), hidden=256, limit=None, fp8=True),
    RowsWorld("few rows by expert, exact", "hybrid", tokens=(4, 3), limit=None, pad=4),
    RowsWorld(
        "few fp8 rows by expert, exact, late",
        "hybrid",
        tokens=(2, 4),
        hidden=256,
        limit=None,
        fp8=True,
        shape=(4, 32),
        slow=(0,),
    ),
    RowsWorld(
        "few rows by expert, exact, no room at first",
        "hybrid",
        tokens=(3, 4),
        limit=None,
        asks=True,
    ),
    RowsWorld("few rows by expert", "hybrid", tokens=(3, 2), limit=12),
    RowsWorld("a row by expert", "hybrid", tokens=(1, 0), limit=6, pad=4, shape=(2, 32)),
    RowsWorld(
        "few rows by expert, late",
        "hybrid",
        tokens=(2, 4),
        limit=16,
        shape=(4, 32),
        slow=(1,),
        dtype="float16",
    ),
    RowsWorld("few rows by expert, stale loads", "hybrid", tokens=(2, 3), limit=12, stale=True),
    RowsWorld("few fp8 rows by expert", "hybrid", tokens=(3, 1), hidden=256, limit=10, fp8=True),
    RowsWorld(
        "few fp8 rows by expert in parts", "hybrid", tokens=(2, 1), hidden=1280, limit=8, fp8=True
    ),
    RowsWorld(
        "fp8 rows by expert, few of one rank",
        "hybrid",
        tokens=(5, 2),
        hidden=1280,
        limit=8,
        fp8=True,
    ),
    RowsWorld("few rows by expert in parts", "hybrid", tokens=(3, 2), hidden=2112, limit=10),
    RowsWorld(
        "few rows by expert with stamps",
        "hybrid",
        tokens=(3, 2),
        limit=12,
        shape=(5, 32),
        trace=True,
    ),
    RowsWorld("few rows by expert, absent peer", "hybrid", tokens=(3, 2), limit=12, absent=(1,)),
    RowsWorld("few rows by expert, too little room", "hybrid", tokens=(4, 3), limit=5),
    RowsWorld(
        "few rows by expert of three ranks, many experts",
        "hybrid",
        tokens=(3, 0, 2),
        limit=40,
        local=12,
        top_k=9,
        hidden=8,
    ),
    RowsWorld(
        "few rows by expert, more experts than two windows",
        "hybrid",
        tokens=(1, 1),
        top_k=110,
        local=70,
        limit=112,
        hidden=8,
        shape=(2, 32),
    ),
    RowsWorld(
        "few rows by expert, two p2p worlds",
        "hybrid",
        tokens=(2, 0, 1, 2),
        top_k=6,
        limit=24,
        shape=(2, 64),
        p2p_world_size=2,
    ),
    RowsWorld(
        "few rows by expert, more than were promised",
        "hybrid",
        tokens=(3, 2),
        limit=12,
        crowded=True,
    ),
    RowsWorld(
        "few rows by expert, parts of a vector a lane",
        "hybrid",
        tokens=(2, 1),
        hidden=1288,
        limit=10,
        shape=(2, 256),
    ),
    RowsWorld("rows without signals", "rows", tokens=(4, 3), shape=(4, 64)),
    RowsWorld(
        "rows without signals in parts",
        "rows",
        tokens=(4, 1),
        hidden=1288,
        shape=(3, 32),
        brief=True,
    ),
    RowsWorld(
        "rows without signals, combines in a row",
        "rows",
        tokens=(0, 4),
        shape=(2, 32),
        combines=3,
        slow=(1,),
    ),
    RowsWorld(
        "rows without signals, late", "rows", tokens=(4, 3), shape=(5, 32), slow=(0,), between=True
    ),
    RowsWorld("rows without signals, stale loads", "rows", tokens=(3, 4), stale=True),
    RowsWorld("rows without signals, absent peer", "rows", tokens=(3, 4), absent=(1,)),
    RowsWorld(
        "rows without signals, no room at first", "rows", tokens=(4, 3), shape=(6, 32), asks=True
    ),
    RowsWorld(
        "rows without signals, a rank with more", "rows", tokens=(3, 7), shape=(4, 32), slow=(1,)
    ),
    RowsWorld(
        "rows without signals behind more",
        "rows",
        tokens=(4, 6),
        local=3,
        top_k=3,
        shape=(4, 32),
        few=4,
        between=True,
        wide=32,
        slow=(0,),
    ),
    RowsWorld(
        "pairs without signals",
        "rows",
        tokens=(4, 2),
        hidden=128,
        pairs=True,
        on_device=True,
        full_heap=(1,),
    ),
    RowsWorld(
        "rows without signals of six ranks",
        "rows",
        tokens=(4, 0, 3, 0, 1, 2),
        top_k=9,
        hidden=8,
        shape=(3, 32),
        brief=True,
    ),
)
