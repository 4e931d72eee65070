"""Mutants that change nothing, each with the reason why: the run fails if one of them is killed, or if others survive.

The names are those of Mutant.key: file, function, what became what.
"""

INPUT = "what it reads no kernel writes while this one runs, so the non-coherent path sees the same bytes"
TURN = ("the turn changes only when all blocks have come, this one among them, which reads it before it comes; the "
        "change before that one it has acquired, or its launch came after it")
COUNT = ("it is read again only by blocks that come to the next barrier, after the turn's release and acquire, so that "
         "a plain store would do")
SWIGLU = "the kernel reads only what an earlier launch wrote; the expert outputs are its input"

HARMLESS = {
    "formats/row_encoder.py encode_row.load_step: load16 -> load16_nc": INPUT + ": input_tokens",
    "formats/row_encoder.py encode_row.load_step: load16 -> load16_nc (number 2)": INPUT + ": input_tokens",
    "reducers.py make.add_shared_expert: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "swiglu.py bf16_rows.fused_silu: load16 -> load16_nc": SWIGLU,
    "swiglu.py bf16_rows.fused_silu: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 3)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 4)": SWIGLU,
    "rows/move.py move_kernel.rows_move: load16 -> load16_nc":
        "the staging area is filled by peers before the launch ahead of this one ends, and again only after this rank "
        "announces its next call",
    "rows/pushers.py expert_sums.sum_row: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "rows/pushers.py expert_sums.sum_row: load16 -> load16_nc (number 2)":
        INPUT + ": the expert outputs given to combine",
    "rows/layout.py make.place_tokens: syncthreads() -> nothing (number 2)":
        "await_notes, which every block passes before it reads row_of, is a barrier of the block; totals lie before "
        "the barrier above",
    "rows/records.py make.record: syncthreads() -> nothing":
        "finish, which follows, begins with a barrier of the block",
    "rows/waits.py of_block.meet: ld_relaxed_gpu_i32 -> ld_relaxed_cta_i32": TURN,
    "rows/waits.py of_block.meet: ld_relaxed_gpu_i32 -> load_i32": TURN,
    "rows/waits.py of_block.meet: st_relaxed_gpu_i32 -> st_relaxed_cta_i32": COUNT,
    "rows/waits.py of_block.meet: st_relaxed_gpu_i32 -> store_i32": COUNT,
}
