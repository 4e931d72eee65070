"""Each rank's recv_buf: places (local expert, source rank, slot) that fill up, and the signals beside them."""

from epmoe import layout
from epmoe.explain.arrays import is_signal, word
from epmoe.explain.svg import Panel, hollow_box, rect, shown, tag, text, token_box

SLOT, LEFT, SIGNAL = 22, 72, 26


def arrived(changes):
    """The signalled count among a recv_count word's changes; None if no signal came."""
    return next((c for c in changes if is_signal(c.value)), None)


def signal_box(history, name, rank, index, x, y):
    """One recv_count word: the count that came; in the page a dash before, and pale when it was read and reset."""
    changes = history.of(name, rank).get(index, [])
    came = arrived(changes)
    place = history.label(name, rank, index)
    steps = [[c.step, word(name, c.value)] for c in changes if came is None or c.step <= came.step]
    steps += [[c.step, word(name, came.value), 1] for c in changes if came is not None and c.step > came.step][:1]
    tip = "no signal was recorded" if came is None else (
        f"signalled at step {came.step} by rank {came.event.rank}, block {came.event.block}; order {came.event.order}, "
        f"scope {came.event.scope}")
    return tag("g", rect(x, y, SIGNAL, SLOT - 4, "cell", 9),
               text(x + SIGNAL / 2, y + 13, "–" if came is None else word(name, came.value), "t small b", "middle",
                    **shown(history=steps)),
               **shown(place, None if came is None else came.value, tip=tip))


def panels(history):
    """A panel for each rank."""
    cfg = history.recording.cfg
    slots = cfg.max_tokens_per_rank
    group = max(slots * SLOT + 6 + SIGNAL + 14, 134)
    width, height = LEFT + cfg.n_local_experts * group, 46 + cfg.n_src_ranks * (SLOT + 6)
    made = []
    for rank in range(cfg.n_ranks):
        parts = [text(0, 12, f"rank {rank} receives", "t b")]
        messages = history.messages(rank)
        for local in range(cfg.n_local_experts):
            x = LEFT + local * group
            parts.append(text(x, 34, f"local_expert {local} = e{rank * cfg.n_local_experts + local}", "m small"))
            for src in range(cfg.n_src_ranks):
                y = 42 + src * (SLOT + 6)
                if local == 0:
                    parts.append(text(0, y + 14, f"from rank {src}", "t small"))
                for slot in range(slots):
                    at = x + slot * SLOT
                    place = history.label("dispatch_recv_buf", rank, (local, src, slot))
                    parts.append(rect(at, y, SLOT - 3, SLOT - 4, "cell", 3,
                                      **shown(tip=f"{place}: nothing was written here in this round")))
                    if (local, src, slot) in messages:
                        filled, token, ids, payload_in = messages[local, src, slot]
                        box = token_box if payload_in is None else hollow_box
                        lies = "" if payload_in is None else (
                            f"; its payload is in {history.label('dispatch_recv_buf', rank, payload_in)}")
                        parts.append(box(at, y, SLOT - 3, SLOT - 4, src, f"t{token}", **shown(
                            place + ".src_info", token, filled.done,
                            tip=f"topk_info = {ids}{lies}; written by {filled.who}, "
                                f"steps {filled.begun} to {filled.done}")))
                parts.append(signal_box(history, "dispatch_recv_count", rank, (local, src), x + slots * SLOT + 3, y))
        made.append(Panel(f"recv_buf of rank {rank}", width, height, "".join(parts)))
    return made


def counted(history):
    """(messages that came, those of them without a payload of their own), of all ranks."""
    came = [m for rank in range(history.recording.cfg.n_ranks) for m in history.messages(rank).values()]
    return len(came), sum(m.payload_in is not None for m in came)


def sizes_text(history):
    """What the messages of this round weigh, in a sentence or two."""
    cfg = history.recording.cfg
    sizes, (n, hollow) = layout.message(cfg), counted(history)
    trailer = sizes.msg_bytes - sizes.token_size
    what = (f"A message is the token's payload ({sizes.token_size:,} bytes) and a trailer ({trailer} bytes) with the "
            "token's number and its expert ids. ")
    if not history.recording.fused or cfg.n_ranks == 1:
        return what + (f"Here each of the {n} messages has both: {n * sizes.msg_bytes:,} bytes. Between several ranks "
                       "the fused kernels (--fused) send a token's payload only once to each.")
    if not hollow:
        return what + ("These fused kernels send a token's payload to a rank only once; in this round no token has two "
                       f"experts on one rank, so each of the {n} messages has both.")
    plain, shared = n * sizes.msg_bytes, n * trailer + (n - hollow) * sizes.token_size
    only = "one is a trailer" if hollow == 1 else f"{hollow} are trailers"
    return what + ("These fused kernels send a token's payload to a rank only once, in the message to the lowest of "
                   f"its experts there. Of {n} messages {only} only, which makes {shared:,} bytes, not {plain:,}.")


def legend_text(history):
    """What the figure's signs mean, one line each."""
    hollow = ["a box with only a frame is a message without a payload: it is in the coloured box of the same name in "
              "the same row"]
    return ["a coloured box is a message: its colour is the source rank, its name the token (src_info); a very "
            "pale one has not come yet",
            *(hollow if counted(history)[1] else []),
            "an empty box is a place that nobody wrote in this round",
            "the rounded box behind a row is the recv_count word: – is \"not arrived\", 2… announces two messages, 2 "
            "is the signal that they are there; pale: it was read and put back to \"not arrived\""]

