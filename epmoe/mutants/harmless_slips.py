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
    "pairs/few_tokens.py make.describe: swap: if expert >= 0 and expert // local == out.dst_rank: / if out.dst_rank == "
    "call.my_rank:": OTHERS,
    "pairs/few_tokens.py make.describe: swap: shared_add_i32(out.low, i32(expert % local), add_low) / shared_add_i32("
    "out.high, i32(expert % local), add_high)": OTHERS,
    "pairs/few_tokens.py make.send_to: swap: if warp_id() == 0: / while token < call.num_tokens:": "the fence orders payloads before the words; ids and their sums have the barrier behind both, and others read "
    "neither before it",
    "pairs/take_rows.py await_begun.await_all: swap: atomic_or_relaxed_gpu_u32(call.status + u64(4 * MISSING_RANK / record_expired(call.status, COMBINE_WAIT, FOR_ROWS, -1, 0, -": "the record is for the host, which looks when the launch has ended",
    "pairs/poll_signals.py make.poll_words: swap: record_expired(call.status, COMBINE_WAIT, FOR_RECV_COUNT, i, / "
    "shared_add_i32(flags, gave_up, i32(1))": "the record is for the host, which looks when the launch has ended",
    "pairs/poll_signals.py make.wait_for: swap: if polls % POLLS_PER_LOOK == 0: / up = is_up(flags, flag)": "two looks at two words, in a loop",
    "rows/few/by_expert.py dispatching.send_and_receive: swap: if placing.total(table, i32(lane_id())) <= "
    "i32(call.params[p / if trace:": "with stamps only, and of these: the time at which a block has copied its rows is that before them",
    "rows/few/by_expert.py _probs.send: "
    "early: put(to, call.epoch, i32(expert + 32), b, r) before s, t = (prob_of(probs, i32(expert + 64), c), prob_of(probs, ": READ,
    "rows/few/by_expert.py _probs.send: "
    "swap: s, t = (prob_of(probs, i32(expert + 64), c), prob_of(probs,  / put(to, call.epoch, expert, a, q)": READ,
    "rows/few/by_expert.py _probs.send: "
    "early: put(to, call.epoch, i32(expert + 64), c, s) before put(to, call.epoch, expert, a, q)": WORDS,
    "rows/few/by_expert.py _probs.send: "
    "early: put(to, call.epoch, i32(expert + 96), d, t) before put(to, call.epoch, expert, a, q)": WORDS,
    "rows/few/by_expert.py _probs.send: "
    "swap: put(to, call.epoch, expert, a, q) / put(to, call.epoch, i32(expert + 32), b, r)": WORDS,
    "rows/few/by_expert.py _probs.send: "
    "swap: put(to, call.epoch, i32(expert + 32), b, r) / put(to, call.epoch, i32(expert + 64), c, s)": WORDS,
    "rows/few/by_expert.py _probs.send: "
    "swap: put(to, call.epoch, i32(expert + 64), c, s) / put(to, call.epoch, i32(expert + 96), d, t)": WORDS,
    "rows/few/send.py _metadata.send: swap: put(at.word(there, lane), value, call.epoch) / if n_probs > 0:": WORDS,
    "rows/expand.py arriving.expand_parts: swap: if come == u32(0) and looks % most_looks == 0: / syncwarp()": "await_flag, inside the condition, ends with a syncwarp of its own, and after it the flags are looked at again",
    "rows/handle.py writing.write_counts: skip: store_i32(info + u64(4 * PADDED_ROWS), i32(0)) left out by every other "
    "thread": "nobody uses this word of dispatches that are not expert-major",
    "rows/routing.py experts_of_ids.count: swap: if expert >= 0: / record(seen, expert, token, slot, "
    "status)": "the two touch different words, and nobody waits for either of them",
}
