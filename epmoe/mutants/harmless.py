"""Mutants that change nothing, each with its reason. The hunt fails if one of them is killed, or if any other survives.

Names are Mutant.key: file, function, old text -> new text.
"""

INPUT = "what it reads no kernel writes while this one runs, so the non-coherent path sees the same bytes"
AGREE = (
    "a thread needs nothing of what the block's others waited for: rows are read by later launches, and the words "
    "that end() resets are of the call before or of the next one. The barrier makes the block agree when a wait "
    "of one thread has expired; without it the call's number moves on, but FAILED keeps every later launch from "
    "beginning until reset() has put all words back"
)
PUT_BACK = (
    "nobody but this warp reads the word while one of its lanes puts it back; who writes it next, two calls on, has "
    "heard in the call between that this rank had begun that one, behind this launch"
)
SWIGLU = "the kernel reads only what an earlier launch wrote; the expert outputs are its input"

LEAVE = (
    "FAILED is looked at once, at the beginning. It changes during a launch only when a wait expires, long after all "
    "threads have looked, since the blocks are resident together; the vote makes a block agree even if they were "
    "not, and then the round has failed anyway"
)

HARMLESS = {
    "formats/row_encoder.py encode_row.load_step: load16 -> load16_nc": INPUT + ": input_tokens",
    "formats/row_encoder.py encode_row.load_step: load16 -> load16_nc (number 2)": INPUT
    + ": input_tokens",
    "plain/combine.py _reduce.with_shared_expert: load16 -> load16_nc": INPUT
    + ": the expert outputs given to combine",
    "plain/messages.py _convert_row.eight_of_fp16: load16 -> load16_nc": INPUT + ": input_tokens",
    "plain/messages.py _convert_row.eight_of_fp32: load16 -> load16_nc": INPUT + ": input_tokens",
    "plain/messages.py _convert_row.eight_of_fp32: load16 -> load16_nc (number 2)": INPUT
    + ": input_tokens",
    **{
        f"plain/{kernel.partition('_')[0]}.py {kernel}.{kernel}: syncthreads_or(has_failed(status)) -> "
        "(has_failed(status))": LEAVE
        for kernel in (
            "dispatch_async_kernel",
            "dispatch_wait_kernel",
            "dispatch_kernel",
            "combine_wait_kernel",
            "combine_kernel",
        )
    },
    "pairs/reduce.py _summing.add_shared_expert: load16 -> load16_nc": INPUT
    + ": the expert outputs given to combine",
    "swiglu.py bf16_rows.fused_silu: load16 -> load16_nc": SWIGLU,
    "swiglu.py bf16_rows.fused_silu: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 3)": SWIGLU,
    "swiglu.py fp8_rows.fused_silu_fp8: load16 -> load16_nc (number 4)": SWIGLU,
    "rows/copy.py move_kernel.rows_move: load16 -> load16_nc": "the staging area is filled by peers before the launch ahead of this one ends, and again only after this rank "
    "announces its next call",
    "rows/reduce.py sum_of_experts.sum_many: load16 -> load16_nc": INPUT
    + ": the expert outputs given to combine",
    "rows/combine.py combine_kernel.rows_combine: syncthreads_or(not reduce_rows(call, notes)) -> "
    "(not reduce_rows(call, notes))": AGREE,
    "rows/dispatch.py expanding.await_rows: syncthreads_or(not ok) -> (not ok)": AGREE,
    "rows/announce.py closing.may_end: syncthreads_or(not ok) -> (not ok)": "what its last thread acquired the barrier of await_notes, which comes behind, gives to the block. "
    + AGREE,
    "rows/few/combine.py _reducing.sum_piece: load16 -> load16_nc": INPUT
    + ": the expert outputs given to combine",
    "rows/few/send.py make.take_part: st_relaxed_sys_u64 -> st_relaxed_gpu_u64": PUT_BACK,
    "rows/few/send.py make.take_part: st_relaxed_sys_u64 -> st_relaxed_cta_u64": PUT_BACK,
    "rows/few/lamport.py _put_back: st_relaxed_sys_u64 -> st_relaxed_gpu_u64": PUT_BACK,
    "rows/few/lamport.py _put_back: st_relaxed_sys_u64 -> st_relaxed_cta_u64": PUT_BACK,
    "rows/few/lamport.py _put_back: st_relaxed_sys_u64 -> store_u64": PUT_BACK,
    "rows/handle.py writing.write_counts: store_i32(info + u64(4 * PADDED_ROWS), i32(0)) -> nothing": "nobody uses this word of dispatches that are not expert-major; the host only copies it with the others",
    "rows/handle.py recording.record_experts: syncthreads() -> nothing": "all_begun, which comes before `recorded` says so, is a barrier of the block too",
    "rows/call.py all_begun: syncthreads_or(not ok) -> (not ok)": "record, which comes before `recorded`, ends with a barrier of the block too; elsewhere only thread 0 needs "
    "what it acquired here, and another barrier comes before end()",
    "rows/few/by_expert.py dispatching.send_and_receive: syncthreads() -> nothing": "with stamps only: it is behind all that the block does, and one that comes earlier stands for an earlier time",
}
