"""Slips that change nothing, each with the reason why; judged as those of harmless.py are. Names are Slip.key."""

STATUS = ("the status words are looked at only when a wait takes long, and blocks of a rank that all run at once do "
          "not make each other wait so long")
OTHERS = "the two touch different words, and the barrier before the signals comes behind both"

FAR = "this argument only tells ranks of other p2p worlds apart"

HARMLESS_SLIPS = {
    "few_tokens.py make.describe: swap: if expert >= 0 and expert // local == owner: / if owner == my_rank:": OTHERS,
    "few_tokens.py make.describe: swap: shared_add_i32(low, i32(expert % local), add_low) / shared_add_i32(high, "
    "i32(expert % local), add_high)": OTHERS,
    "returners.py make.signal_entry: whose: my_rank -> source in signal(params, rank_of(entry, my_rank), my_rank, "
    "i32(entry -": FAR + "; source differs from my_rank under skip_a2a alone, which has nobody far",
    "rows/senders.py make.send: swap: if is_numbered_now and mine == 0 and shared: / if shared:":
        "the first lets rows be looked at, which the second does not do: it takes a number",
    "watchers.py make.watch: swap: record_expired(status, COMBINE_WAIT, FOR_RECV_COUNT, i, 0, - / "
    "shared_add_i32(flags, gave_up, i32(1))": "the record is for the host, which looks when the launch has ended",
    "watchers.py make.wait_for: swap: if polls % POLLS_PER_LOOK == 0: / up = is_up(flags, flag)":
        "two looks at two words, in a loop",
    "rows/expanders.py make.await_records: whose: control.STATUS -> control.RECORDED in ok = wait_for_own_blocks(words "
    "+ u64(control.RECORDED), i32(": STATUS,
    "rows/waits.py of_block.all_begun: whose: control.STATUS -> control.BEGUN in ok = wait_for_own_blocks(words + "
    "u64(control.BEGUN), i32(gri": STATUS,
    "rows/exchange.py make.await_word: whose: source -> my_rank in return waits.wait_for_word_of_peer(address, "
    "u64(ld_acquire_s": "only the record of an expired wait has it, and the host names who is missing by the notes",
    "rows/expanders.py make.expand_rows: swap: if come == u32(0) and looks % LOOKS == 0: / syncwarp()":
        "await_flag, inside the condition, ends with a syncwarp of its own, and after it the flags are looked at again",
}
