"""Slips (edited statements) that change nothing, each with its reason; judged like harmless.py. Names are Slip.key."""

STATUS = (
    "the status words are looked at only when a wait takes long, and blocks of a rank that all run at once do "
    "not make each other wait so long"
)
OTHERS = "the two touch different words, and the barrier before the signals comes behind both"

HERALD = "the herald's warp and what others do before the block meets touch nothing that the other one writes"
EARLIER = (
    "the fence orders earlier launches before what is told; what changes places with it only reads"
)
ALL_BEGUN = "all_begun, which comes before `recorded` says so, is a barrier of the block too"

WORDS = (
    "the two store different words, each of which names the call; nothing is ordered between words"
)

SOONER = "dispatch_async is waited for sooner; what changes places with the wait reads parameters, or the clock"
READ = "the inputs that it reads no kernel writes"

HARMLESS_SLIPS = {
    "plain/receive.py make.offset_groups: skip: out.row_offsets[0] = 0 left out by every other thread": "lane 0 alone stores it",
    "plain/dispatch.py _sending.send_signal: swap: to_peers.signal(to, dst_rank, segment(local_expert, to.my_ra / if "
    "to_peers.is_near(dst_rank, to.my_rank):": "nobody waits for rank completion; it is right when the launch has ended",
    "plain/peers.py make.signal: swap: own = u64(to.recv_count_ptrs[to.my_rank % p2p_world_size]) / shmem_fence()": "the first only makes an address of an argument",
    "plain/dispatch.py _sending.send_messages: swap: if fused_shared_expert and thread_idx() == 0 and (t >= first / "
    "send_pairs(topk_ids, t, place, to, ep_counters, call)": "F says that the token is encoded, which the barrier before both has seen to; it may be counted later",
    "pairs/dispatch.py _compile_wait.dispatch_wait: swap: call = begin(params, num_tokens, my_rank) / griddep_wait()": SOONER,
    "rows/expert_dispatch.py dispatching.of_others: swap: if total_rows(known, i32(lane_id())) <= i32(params[p_capacit / if trace:": "with stamps only, and of these: the time at which a block has copied its rows is that before them",
    "rows/window_probs.py make.send: early: put(to, epoch, i32(expert + 32), b, q) before r, s = (prob_of(probs, "
    "i32(expert + 64), c), prob_of(probs, ": READ,
    "rows/window_probs.py make.send: swap: r, s = (prob_of(probs, i32(expert + 64), c), prob_of(probs,  / put(to, "
    "epoch, expert, a, p)": READ,
    "rows/window_probs.py make.send: early: put(to, epoch, i32(expert + 64), c, r) before put(to, epoch, expert, a, "
    "p)": WORDS,
    "rows/window_probs.py make.send: early: put(to, epoch, i32(expert + 96), d, s) before put(to, epoch, expert, a, "
    "p)": WORDS,
    "rows/window_probs.py make.send: swap: put(to, epoch, expert, a, p) / put(to, epoch, i32(expert + 32), b, q)": WORDS,
    "rows/window_probs.py make.send: swap: put(to, epoch, i32(expert + 32), b, q) / put(to, epoch, i32(expert + 64), "
    "c, r)": WORDS,
    "rows/window_probs.py make.send: swap: put(to, epoch, i32(expert + 64), c, r) / put(to, epoch, i32(expert + 96), "
    "d, s)": WORDS,
    "rows/lamport_combine.py _pushing.push: swap: while a < b: / if has_probs and part == 0 and (lane < n_meta):": WORDS,
    "rows/lamport_words.py more.send: swap: put(word_at(there, lane), value, epoch) / if n_probs > 0:": WORDS,
    "pairs/few_tokens.py make.describe: swap: if expert >= 0 and expert // local == out.dst_rank: / if out.dst_rank == "
    "call.my_rank:": OTHERS,
    "pairs/few_tokens.py make.describe: swap: shared_add_i32(out.low, i32(expert % local), add_low) / shared_add_i32("
    "out.high, i32(expert % local), add_high)": OTHERS,
    "pairs/few_tokens.py make.send_to: swap: if warp_id() == 0: / while token < call.num_tokens:": "the fence orders payloads before the words; ids and their sums have the barrier behind both, and others read "
    "neither before it",
    "rows/senders.py make.send: swap: if is_numbered_now and mine == 0 and shared: / if shared:": "the first lets rows be looked at, which the second does not do: it takes a number",
    "pairs/poll_signals.py make.poll_words: swap: record_expired(call.status, COMBINE_WAIT, FOR_RECV_COUNT, i, / "
    "shared_add_i32(flags, gave_up, i32(1))": "the record is for the host, which looks when the launch has ended",
    "pairs/poll_signals.py make.wait_for: swap: if polls % POLLS_PER_LOOK == 0: / up = is_up(flags, flag)": "two looks at two words, in a loop",
    "rows/expanders.py make.await_records: whose: control.STATUS -> control.RECORDED in ok = wait_for_own_blocks(words "
    "+ u64(control.RECORDED), i32(": STATUS,
    "rows/waits.py of_block.has_begun: whose: control.STATUS -> control.BEGUN in return wait_for_own_blocks(words + "
    "u64(control.BEGUN), i32(g": STATUS,
    "rows/expanders.py make.expand_rows: swap: if come == u32(0) and looks % LOOKS == 0: / syncwarp()": "await_flag, inside the condition, ends with a syncwarp of its own, and after it the flags are looked at again",
    "rows/dispatch.py dispatch_kernel.rows_dispatch: swap: if roles.is_herald(): / vectors, is_ahead = (unprepared_vecto"
    "rs(), has_vectors and i": HERALD,
    "rows/dispatch.py dispatch_kernel.rows_dispatch: swap: fence_acq_rel_sys() / looked = look(params, num_tokens, "
    "my_rank, i32(0))": EARLIER,
    "rows/exchange.py heralding.herald: swap: if tells_places: / looked = look(params, num_tokens, my_rank, i32(0))": EARLIER,
    "rows/records.py make.record_counts: skip: store_i32(info + u64(4 * PADDED_ROWS), i32(0)) left out by every other "
    "thread": "nobody uses this word of dispatches that are not expert-major",
    "rows/records.py make.record: early: syncthreads() before record_counts(params, notes, has_room)": ALL_BEGUN,
    "rows/records.py make.record: swap: record_experts(params, gathered, partial) / syncthreads()": ALL_BEGUN,
    "rows/routing.py experts_of_ids.count: swap: if counts and expert >= 0: / record(seen, expert, token, slot, "
    "status)": "the two touch different words, and nobody waits for either of them",
}
