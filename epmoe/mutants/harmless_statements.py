"""Edits of statements that change nothing, each with its reason. The hunt judges them like harmless.py.

Names are StatementMutation.key.
"""

OTHERS = "the two touch different words, and the barrier before the signals follows both"
WORDS = "the two store different words, and each word names the call; words have no order among them"
SOONER = "the wait for dispatch_async comes sooner; the other statement reads only parameters or the clock"
READ = "no kernel writes the inputs that it reads"

VOTE = "the vote that follows synchronises the lanes too, as in harmless.py"

HARMLESS_STATEMENTS = {
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
    "pairs/few_tokens.py make.describe: swap: if expert >= 0 and expert // local == dst_rank: / if dst_rank == "
    "call.my_rank:": OTHERS,
    "pairs/few_tokens.py make.describe: swap: shared_add_i32(low, i32(expert % local), add_low) / shared_add_i32("
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
