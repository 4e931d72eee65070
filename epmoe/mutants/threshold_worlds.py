"""Worlds at the kernels' own thresholds: sizes just below, at and just above them, several in each world.

`epmoe mutants --thresholds` prints which world is on which side of each threshold.
"""

from epmoe.kernels.rows.copy import BATCH
from epmoe.kernels.rows.mailbox import MOST_PARTS
from epmoe.kernels.rows.reduce import MOST as MOST_ROWS
from epmoe.kernels.rows.shape import SMALL
from epmoe.mutants.page_worlds import PLAIN
from epmoe.mutants.rows_worlds import ORDINARY, SIGNALS, tuned
from epmoe.mutants.world_kinds import RowsWorld, World

VECTOR = 8  # columns of bf16 in an access of 16 bytes
WARP = 32
SCALED = 128  # columns of FP8 with one scale
MOST_COLUMNS = VECTOR * MOST_PARTS * BATCH  # of a row whose parts are one batch each
RECEIVERS = dict(few_receivers_a_token=1, few_receivers=1)

THRESHOLD_WORLDS = (
    # Lamport rows, one vector more than the most parts hold with a batch each, so that later parts are empty
    RowsWorld("rows of more batches than parts", "rows", tokens=(1, 1), hidden=MOST_COLUMNS + VECTOR, brief=True),
    RowsWorld("rows of more batches than parts, with signals", "rows", tokens=(1, 1), hidden=MOST_COLUMNS + VECTOR,
              brief=True, constants=SIGNALS),
    RowsWorld("few rows by expert of more batches than parts", "hybrid", tokens=(1, 1), hidden=MOST_COLUMNS + VECTOR,
              limit=6, shape=(2, 64)),
    # as many tokens as may go without signals, one less, none, one; as many ranks as are summed together
    RowsWorld("rows without signals of four ranks", "rows",
              tokens=(SMALL.lamport_tokens, SMALL.lamport_tokens - 1, 0, 1), top_k=5, hidden=VECTOR * (WARP + 1),
              brief=True),
    # one rank has one token too many, so the others erase rows of two parts, the second of one vector more than a warp
    RowsWorld("rows without signals in parts, erased", "rows",
              tokens=(SMALL.lamport_tokens - 1, SMALL.lamport_tokens + 1), local=3, top_k=3,
              hidden=VECTOR * (BATCH + WARP + 1), shape=(3, 64), few=SMALL.lamport_tokens - 1,
              wide=VECTOR * (BATCH + WARP + 1), between=True, brief=True, slow=(0,)),
    RowsWorld("rows of eight ranks", "rows", tokens=(SMALL.lamport_tokens + 1, 0, 1, 0, 0, 1, 0, 0), top_k=9,
              hidden=VECTOR * WARP, shape=(2, 32), brief=True),
    # one scale more than a warp has lanes
    RowsWorld("pairs of more scales than lanes", "rows", tokens=(2, 1), hidden=SCALED * (WARP + 1), pairs=True,
              brief=True),
    # a token's experts at a rank: fewer and more than sums have loops for; rows of more vectors than a loop's turn
    RowsWorld("hybrid, as many experts of a token as loops", "hybrid", tokens=(4, 2),
              top_k=2 * SMALL.loops_of_experts + 1, local=2 * SMALL.loops_of_experts, limit=60,
              hidden=VECTOR * (4 * WARP + 2), shape=(2, 32), constants=ORDINARY, brief=True),
    # as many experts as a warp, a block and four windows have lanes, and one more than these
    RowsWorld("few rows by expert, as many experts as lanes", "hybrid", tokens=(2, 1), top_k=8, local=WARP, limit=24,
              hidden=VECTOR * WARP),
    RowsWorld("hybrid, as many experts as threads", "hybrid", tokens=(SMALL.lamport_tokens + 1, 1), top_k=3,
              local=2 * WARP, limit=24, hidden=VECTOR, shape=(3, 2 * WARP)),
    RowsWorld("few rows by expert, as many experts as four windows", "hybrid", tokens=(SMALL.lamport_tokens, 1),
              top_k=9, local=4 * WARP, limit=48, hidden=VECTOR, shape=(2, 4 * WARP)),
    RowsWorld("few rows by expert, one more than four windows", "hybrid", tokens=(2, 1), top_k=9, local=4 * WARP + 1,
              limit=40, hidden=VECTOR, shape=(2, 4 * WARP)),
    # a rank's sums of about as many rows as are gathered at once
    RowsWorld("hybrid, as many experts of a token as lanes", "hybrid", tokens=(3, 2), top_k=75,
              local=MOST_ROWS + VECTOR, limit=200, hidden=VECTOR, shape=(2, 32), constants=ORDINARY),
    # sums of up to four rows of one vector more than a warp; calls with few and with many tokens alternate
    RowsWorld("hybrid, few tokens between more", "hybrid", tokens=(SMALL.lamport_tokens + 1, 2), top_k=6, local=4,
              limit=30, hidden=VECTOR * (WARP + 1), few=SMALL.lamport_tokens, between=True, slow=(1,)),
    # as many experts as a block has room for; two warps share the sum of one vector
    RowsWorld("few rows by expert, few bits at a time", "hybrid",
              tokens=(SMALL.lamport_tokens, SMALL.lamport_tokens - 1), top_k=3, limit=24, hidden=VECTOR, shape=(6, 64),
              constants=tuned(bits_word_of_few=1)),
    # pieces of more vectors than a lane holds, and of as many
    World("few tokens, more vectors than are held",
          PLAIN | dict(hidden=VECTOR * (2 * BATCH + 1), max_tokens_per_rank=8), ((8, 3), (1, 0)), fused=True,
          shape=(6, 32), constants={"pairs.send_back.ROWS_AHEAD": 3}, tuning=RECEIVERS),
    World("few tokens, all vectors held", PLAIN | dict(hidden=VECTOR * 2 * BATCH, max_tokens_per_rank=8), ((8, 3),),
          shape=(4, 32)),
    World("few tokens, bad ids", PLAIN, ((5, 5),), fused=True, shape=(6, 32), bad_ids=True, tuning=dict(few_experts=2)),
    World("few tokens, too many experts", PLAIN, ((5, 3), (2, 2)), fused=True, shape=(6, 32),
          tuning=dict(few_experts=1)),
    # more entries than a warp can search for a row in two votes
    World("rows among very many entries",
          dict(n_ranks=2, n_experts=WARP**2 + 16, top_k=2, hidden=8, max_tokens_per_rank=9), ((9, 2),), fused=True,
          shape=(2, 32)),
    World("as many batches as one block sends", PLAIN | dict(max_tokens_per_rank=8), ((8, 7),), fused=True,
          tuning=dict(turns_from=2, batch_messages=8, few_tokens=0)),
    # fewer words of signals than warps that could poll them
    World("signals polled by one warp of eight", PLAIN, ((2, 1),), fused=True, shape=(2, 8 * WARP),
          tuning=dict(few_tokens=0)),
    # more parts of rows than warps take at once
    RowsWorld("hybrid, many rows for two warps", "hybrid", tokens=(12, 9), top_k=3, limit=60, hidden=VECTOR,
              shape=(2, WARP), constants=ORDINARY),
    # payloads with more padding than a warp clears at once
    World("few bytes of a message and much padding", PLAIN | dict(hidden=64, token_format="nvfp4", alignment=256),
          ((5, 3),), fused=True),
    # as many tokens of a small batch as a warp reads at once, four a lane, and one more
    RowsWorld("rows without signals of four tokens a lane", "rows", tokens=(4 * WARP, 4 * WARP + 1), top_k=1,
              hidden=VECTOR, shape=(3, WARP), brief=True, constants=tuned(lamport_tokens=4 * WARP + 1)),
)
