"""Mutants that change nothing, each with its reason. The hunt fails if one is killed, or if any other survives.

Names are Mutant.key (file, function: old text -> new text) and StatementMutation.key.
"""

INPUT = "no kernel writes this memory while this one runs, so the non-coherent path reads the same bytes"
AGREE = (
    "no thread needs what the block's other threads waited for: later launches read the rows, and end() resets words "
    "of the previous or the next call. The barrier makes the block agree when one thread's wait has expired. Without "
    "it the call's number advances, but FAILED stops every later launch until reset() has restored all words"
)
PUT_BACK = (
    "only this warp reads the word while one of its lanes resets it. The next writer, two calls later, has learned in "
    "the call between that this rank has begun that call, after this launch"
)
SWIGLU = "the kernel reads only the expert outputs, which an earlier launch wrote"

LEAVE = (
    "each thread reads FAILED once, at the beginning. During a launch FAILED changes only when a wait expires. All "
    "blocks are resident together, so by then all threads have read it. The vote makes a block agree even if they "
    "were not, and then the round has failed anyway"
)

VOTE = (
    "the vote that follows synchronises the lanes too. The barrier guards against an error that was seen on GPUs only: "
    '"Lanes meet" in benchmarks/notes/rows.md'
)

TOLD_STATUS = (
    "bad ids are noted before the counts that the leader block has acquired. Only a wait that expires at this moment "
    "writes the words meanwhile, and the next call that waits raises that"
)

OTHERS = "the two touch different words, and the barrier before the signals follows both"
WORDS = "the two store different words, and each word names the call; words have no order among them"
SOONER = "the wait for dispatch_async comes sooner; the other statement reads only parameters or the clock"

HARMLESS = {
    "formats/row_encoder.py encode_row.encode_part: load16 -> load16_nc": INPUT + ": input_tokens",
    "formats/row_encoder.py encode_row.encode_part: load16 -> load16_nc (number 2)": INPUT + ": input_tokens",
    "plain/combine.py _reduce.with_shared_expert: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "plain/messages.py _convert_row.eight_of_fp16: load16 -> load16_nc": INPUT + ": input_tokens",
    "plain/messages.py _convert_row.eight_of_fp32: load16 -> load16_nc": INPUT + ": input_tokens",
    "plain/messages.py _convert_row.eight_of_fp32: load16 -> load16_nc (number 2)": INPUT + ": input_tokens",
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
    "pairs/reduce.py _reduced.reduce_run: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "swiglu.py bf16_rows.piece: load16 -> load16_nc": SWIGLU,
    "swiglu.py bf16_rows.piece: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.piece: load16 -> load16_nc": SWIGLU,
    "swiglu.py fp8_rows.piece: load16 -> load16_nc (number 2)": SWIGLU,
    "swiglu.py fp8_rows.piece: load16 -> load16_nc (number 3)": SWIGLU,
    "swiglu.py fp8_rows.piece: load16 -> load16_nc (number 4)": SWIGLU,
    "rows/copy.py move_kernel.rows_move: load16 -> load16_nc": "peers fill the staging area before the previous launch ends, and again only after this rank announces its next "
    "call",
    "rows/reduce.py sum_of_experts.sum_at: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "rows/combine.py combine_kernel.rows_combine: syncthreads_or(not reduce_rows(call, announced)) -> "
    "(not reduce_rows(call, announced))": AGREE,
    "rows/dispatch.py sending_and_finishing.by_flags: syncthreads_or(not ok) -> (not ok)": AGREE,
    "rows/announce.py closing.may_end: syncthreads_or(not ok) -> (not ok)": "the barrier of await_part, which follows, passes on to the block what the last thread acquired. "
    + AGREE,
    "rows/small/combine.py _reducing.sum_run: load16 -> load16_nc": INPUT + ": the expert outputs given to combine",
    "rows/small/lamport.py put_back: st_relaxed_sys_u64 -> st_relaxed_gpu_u64": PUT_BACK,
    "rows/small/lamport.py put_back: st_relaxed_sys_u64 -> st_relaxed_cta_u64": PUT_BACK,
    "rows/handle.py writing.write_counts: store_i32(info + u64(4 * PADDED_ROWS), i32(0)) -> nothing": "only expert-major dispatches use this word; otherwise the host merely copies it with the others",
    "rows/handle.py telling_host.word_at: ld_relaxed_gpu_i32 -> ld_relaxed_cta_i32": TOLD_STATUS,
    "rows/handle.py telling_host.word_at: ld_relaxed_gpu_i32 -> load_i32": TOLD_STATUS,
    "rows/expand.py _expert_rows.expert_rows: syncwarp() -> nothing": VOTE,
    "rows/reduce.py gather: syncwarp() -> nothing": VOTE,
    "rows/reduce.py sum_of_experts.sum_at: syncwarp() -> nothing": VOTE,
    "rows/call.py leader_awaits_begun: syncthreads_or(not ok) -> (not ok)": "record runs before `recorded` is set, and ends with a barrier of the block. Elsewhere only thread 0 needs what it "
    "acquired here, and another barrier precedes end()",
    # of whole statements
    "rows/expand.py _expert_rows.expert_rows: early: syncwarp() before (row, src_rank), writes = (received, is_first and "
    "first == 0": VOTE,
    "rows/expand.py _expert_rows.expert_rows: swap: if has_meta and mine >= 0: / syncwarp()": VOTE,
    "rows/reduce.py sum_of_experts.sum_at: swap: addresses = experts_from(params, row, expert, lane) / syncwarp()": VOTE,
    "plain/receive.py make.offset_groups: skip: out.row_offsets[0] = 0 left out by every other thread": "only lane 0 stores it",
    "plain/dispatch.py _sending.send_signal: swap: to_peers.signal(to, dst_rank, segment(local_expert, to.my_ra / if "
    "to_peers.is_near(dst_rank, to.my_rank):": "nobody waits for rank completion; it must be right only when the launch has ended",
    "plain/peers.py make.signal: swap: own = u64(to.recv_count_ptrs[to.my_rank % p2p_world_size]) / shmem_fence()": "the first only computes an address from an argument",
    "pairs/peers.py make.signal: swap: own = word_at(call, call.my_rank, index) / shmem_fence()": "the first only computes "
    "an address from the context, which never changes",
    "plain/dispatch.py _sending.send_messages: swap: if fused_shared_expert and thread_idx() == 0 and (t >= first / "
    "send_pairs(topk_ids, t, place, to, ep_counters, call)": "F says that the token is encoded, and the barrier before both ensures that; the token may be counted later",
    "pairs/dispatch.py _compile_wait.dispatch_wait: swap: call = begin(params, num_tokens, my_rank) / griddep_wait()": SOONER,
    "pairs/few_tokens.py make.add_token: swap: if expert >= 0 and expert // local == dst_rank: / if dst_rank == "
    "call.my_rank:": OTHERS,
    "pairs/few_tokens.py make.add_token: swap: shared_add_i32(low, i32(expert % local), add_low) / shared_add_i32("
    "high, i32(expert % local), add_high)": OTHERS,
    "pairs/few_tokens.py make.send_to: swap: if warp_id() == 0: / while token < call.num_tokens:": "the fence orders payloads before the words; the barrier after both covers ids and their sums, which others read only "
    "after it",
    "pairs/await_rows.py polling.poll_words: swap: record_expired(call.status, COMBINE_WAIT, FOR_RECV_COUNT, i, / "
    "shared_add_i32(flags, gave_up, i32(1))": "the record is for the host, which reads it when the launch has ended",
    "pairs/await_rows.py polling.wait_for: swap: if polls % POLLS_PER_LOOK == 0: / up = is_up(flags, flag)": "the two read different words, in a loop",
    "rows/small/dispatch.py _tokens.put_choice: swap: put(at.word(to[0], k), local_expert, to[1]) / if n_probs > 0:": WORDS,
    "rows/small/send.py _parts.send: swap: if escape != u32(ABSENT): / if has(others, lane):": "the first changes the batch, and the second sends the escape",
    "rows/handle.py writing.write_counts: skip: store_i32(info + u64(4 * PADDED_ROWS), i32(0)) left out by every other "
    "thread": "only expert-major dispatches use this word",
    "rows/routing.py experts_of_ids.count: swap: if expert >= 0: / record(seen, expert, token, k, "
    "status)": "the two touch different words, and nobody waits for either",
}
