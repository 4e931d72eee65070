"""Lesson 2: The message, and the memory into which peers write it."""

if __name__ == "__main__":
    from epmoe.lessons.telling import tell

    tell(__file__)
    raise SystemExit

# In lesson 1 a row went from rank to rank by an assignment. Between GPUs of
# one host this is nearly true: over NVLink a thread of one GPU can store into
# the memory of another, at any address that it knows. There is no "send" and
# no "receive". There are bytes, and a question: which bytes may I write?
#
# ## A place for every message
#
# Two writers must never write to the same place. They could first agree on
# how much room each one needs, but that costs a round trip. Kernels for small
# batches avoid it: every rank keeps a buffer, recv_buf, with room for
# everything that the others could ever send to it:
#
#   recv_buf[local_expert][src_rank][slot]      one message in each place
#
# Only rank src_rank writes to the places [...][src_rank][...]. How many slots
# must there be for one expert and one src_rank? A token names an expert at
# most once, because its ids are distinct. So there must be as many slots as a
# rank can have tokens.
#
# Here is a small world, with the experts and ranks of lesson 1 and a limit on
# the number of tokens:

import ml_dtypes
import numpy as np
from epmoe import EPConfig, ExpertParallel, LocalWorld

cfg = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=8,
               max_tokens_per_rank=3)
N_LOCAL = cfg.n_experts // cfg.n_ranks

# ## What a message holds
#
# The token's numbers are called the payload. The receiver needs more than
# that: it must later send the result back to the right token and k. So a
# trailer follows:
#
#   payload     the numbers, here hidden x bf16 (2 bytes each)
#   src_info    int32: the token's number on its rank
#   topk_info   uint16 x top_k: the token's expert ids, in the order of k
#
# The message need not hold src_rank, because its place in recv_buf tells it.
# The receiver finds k too: it is the position of its expert id in topk_info.
#
# GPUs move memory best in pieces of 16 bytes, at addresses divisible by 16.
# So each of the three parts is padded with zeros to a multiple of 16:
#
# Predict: hidden is 8 and top_k is 2. How many bytes does a message have, and
# how many of them carry information?


def align16(n):
    """The next multiple of 16, in bytes."""
    return (n + 15) // 16 * 16


payload_bytes = align16(2 * cfg.hidden)
src_info_bytes = align16(4)
topk_info_bytes = align16(2 * cfg.top_k)
msg_bytes = payload_bytes + src_info_bytes + topk_info_bytes
print(payload_bytes, "+", src_info_bytes, "+", topk_info_bytes, "bytes =",
      msg_bytes, "bytes")
print(2 * cfg.hidden + 4 + 2 * cfg.top_k, "of them carry information")

# This function builds a message:


def message(token, row, ids):
    """uint8 (msg_bytes): a row (hidden) and its ids (top_k) as bytes."""
    out = np.zeros(msg_bytes, np.uint8)
    payload = row.astype(ml_dtypes.bfloat16).view(np.uint8)
    out[:len(payload)] = payload
    at = payload_bytes
    out[at:at + 4] = np.array([token], "<i4").view(np.uint8)
    at += src_info_bytes
    out[at:at + 2 * cfg.top_k] = np.array(ids, "<u2").view(np.uint8)
    return out


# To recognise a token by its numbers, let token t of rank r hold 10r + t.

x = [np.array([[0], [1], [2]]), np.array([[10], [11]])]
x = [np.tile(t, cfg.hidden).astype(ml_dtypes.bfloat16) for t in x]
topk_ids = [np.array([[0, 2], [3, 2], [2, 1]]), np.array([[1, 3], [2, 0]])]

sent = message(1, x[0][1], topk_ids[0][1])
print("token 1 of rank 0, 16 bytes a line:")
for line in sent.reshape(-1, 16):
    print("  " + " ".join(f"{byte:02x}" for byte in line))

# (80 3f is the bf16 number 1.0, lowest byte first. 01 00 00 00 is the token's
# number, 03 00 and 02 00 are its expert ids.)
#
# The project's reference builds the same bytes:

assert (cfg.format.messages(x[0], topk_ids[0])[1] == sent).all()

# ## The address
#
# recv_buf is one piece of memory, with its axes in the order above. Addresses
# work as in any array: the stride of an axis is the product of the sizes of
# all axes after it.

shape = (N_LOCAL, cfg.n_ranks, cfg.max_tokens_per_rank, msg_bytes)


def offset(local_expert, src_rank, slot):
    """The byte of recv_buf at which a place begins."""
    place = local_expert
    place = place * cfg.n_ranks + src_rank
    place = place * cfg.max_tokens_per_rank + slot
    return place * msg_bytes


print(f"shape {shape}: {np.prod(shape)} bytes")
print("local expert 1, from rank 0, slot 2 begins at byte", offset(1, 0, 2))
for place in np.ndindex(shape[:3]):
    assert offset(*place) == np.ravel_multi_index((*place, 0), shape)

# ## Inside a real recv_buf
#
# Now the project's own kernels do a dispatch. They need no GPU: a simulator
# runs their source, with all threads of both ranks at once. Afterwards we
# look at the memory of rank 1, which owns experts 2 and 3. There are two sets
# of kernels. The plain ones follow the specification word by word. The fast
# ones give the same results in less time, by taking shortcuts.
#
# Predict: recv_buf of rank 1 has 12 places. How many of them will hold a
# message?

world = LocalWorld(cfg.n_ranks, seed=0)
with ExpertParallel(cfg, world, kernels="plain") as ep:
    dispatched = ep.dispatch(x, topk_ids)
    recv_buf = ep.region("dispatch_recv_buf", 1).reshape(-1)

assert recv_buf.nbytes == np.prod(shape)
for le, src, slot in np.ndindex(shape[:3]):
    at = offset(le, src, slot)
    held = recv_buf[at:at + msg_bytes]
    begins = " ".join(f"{byte:02x}" for byte in held[:4])
    print(f"expert {2 + le} rank {src} slot {slot} byte {at:3}", begins,
          end=" ")
    if (held == 0xA5).all():
        print("not written")
        continue
    token = int(held[payload_bytes:payload_bytes + 4].view("<i4")[0])
    ids = held[payload_bytes + src_info_bytes:].view("<u2")[:cfg.top_k]
    k = int(np.argmax(ids == 2 + le))
    print(f"token {token} k={k}")
    right = message(token, x[src][token], topk_ids[src][token])
    assert (held == right).all()
    assert topk_ids[src][token, k] == 2 + le

# The simulator fills fresh memory with a5, so unwritten places are easy to
# see. On a GPU they would hold messages of an earlier round, which look just
# the same. You cannot tell from recv_buf which slots are filled. The counts
# say so, and the result of dispatch has them:

print("rows for each (local expert, src_rank) of rank 1:")
print(dispatched[1].numpy().recv_count)

# The data does not determine which slot a message gets. Lesson 3 is about
# that.
#
# ## The same payload twice?
#
# Look again at token 1 of rank 0. Both of its experts are on rank 1, so its
# payload was sent there twice. The fast kernels send it once, in the message
# to the lowest of the token's experts on a rank. The other messages are
# trailers only. A trailer must say where its payload is. src_info uses 4 of
# its 16 bytes. The next 4 hold 1 + the number of the message that has the
# payload, counted through recv_buf. (0 means that the payload is here, as in
# the messages above.)

world = LocalWorld(cfg.n_ranks, seed=0)
with ExpertParallel(cfg, world, kernels="fast") as ep:
    once = ep.dispatch(x, topk_ids)
    places = ep.region("dispatch_recv_buf", 1).reshape(shape)
held = places[3 - 2, 0]                 # expert 3, from rank 0: 3 slots
slot = int(np.argmax(held[:, payload_bytes] == 1))
print("token 1 of rank 0, to expert 3, 16 bytes a line:")
for line in held[slot].reshape(-1, 16):
    print("  " + " ".join(f"{byte:02x}" for byte in line))
says = int(held[slot, payload_bytes + 4:payload_bytes + 8].view("<i4")[0])
le, src, s = (int(i) for i in np.unravel_index(says - 1, shape[:3]))
print(f"its payload is in the message to expert {2 + le}, "
      f"from rank {src}, slot {s}")
assert (places[le, src, s] == message(1, x[0][1], topk_ids[0][1])).all()
assert (held[slot, :payload_bytes] == 0xA5).all()
counts = [d[1].numpy().recv_count for d in (once, dispatched)]
assert (counts[0] == counts[1]).all()

# The receiver reads the payload there. The rows that dispatch returns are the
# same. The sender alone decides, so the two kinds of messages can be mixed.
#
# ## The price
#
# Room for everything that could be sent is a lot of room. Take the sizes of
# lesson 1 on 4 GPUs, with at most 128 tokens each:

real = EPConfig(n_ranks=4, n_experts=256, top_k=8, hidden=7168,
                max_tokens_per_rank=128)
plan = {use.buffer: use.planned_bytes for use in ExpertParallel.plan(real)}
room = plan["dispatch_recv_buf"]
filled = 128 * 8 * real.format.msg_size()   # if all ranks get equal shares
print(f"recv_buf has {room / 1e6:.0f} MB")
print(f"a dispatch fills {filled / room:.1%} of it")
assert room == 64 * 4 * 128 * real.format.msg_size()

# Only filled slots are moved, so this costs memory but no time. With 4096
# tokens recv_buf would be 32 times as large. Then it pays to agree on sizes
# first, as the "rows" kernels of lesson 6 do.
#
# ## Worked problems
#
# 1. How long is a message with hidden = 7168 and top_k = 8?
#
# Answer: The payload has 14336 bytes, src_info 16, and topk_info 2 x 8 = 16.
# Together 14368.

assert real.format.msg_size() == 14336 + 16 + 16 == 14368

# 2. Which share of that message is not payload? Which share would it be with
#    hidden = 128?
#
# Answer: 32 of 14368 bytes, 0.2 %. With hidden = 128 it is 32 of 288, 11 %.
# Narrow tokens pay for their trailers.

assert round(3200 / 14368, 1) == 0.2 and round(3200 / 288) == 11

# 3. 8 ranks, 256 experts, at most 128 tokens a rank, messages as in
#    problem 1. How large is recv_buf, and which part of it does a balanced
#    dispatch fill?
#
# Answer: 32 local experts x 8 ranks x 128 slots x 14368 bytes = 471 MB. A
# rank receives 8 x 128 x 8 / 8 = 1024 of the 32768 messages that fit: 3.1 %.

assert 32 * 8 * 128 * 14368 == 470_810_624
assert round(100 * 1024 / (32 * 8 * 128), 1) == 3.1

# 4. In a world of 4 ranks and at most 128 tokens, at which byte begins the
#    message of rank 1 in slot 5 of local expert 2?
#
# Answer: It is place (2 x 4 + 1) x 128 + 5 = 1157, so it begins at byte 1157
# x 14368 = 16623776.

assert ((2 * 4 + 1) * 128 + 5) * 14368 == 16_623_776

# ## Exercises
#
# WARM-UP. How many bytes does a message with hidden = 100 (bf16) and top_k = 9
# have? Set WARM_UP.
#
# CORE. Write the function that a sender needs before it can store anything:
#
#   place(n_ranks, n_experts, top_k, hidden, max_tokens,
#         expert, src_rank, slot)
#
# It returns two numbers: the rank that owns `expert` (a global id), and the
# byte offset in that rank's recv_buf at which the message from src_rank in
# that slot begins. The payload is hidden numbers of bf16. Each of the three
# parts of a message is padded to a multiple of 16 bytes.
#
# STRETCH. 8 ranks, 256 experts, hidden = 7168, top_k = 8. By how many bytes
# does recv_buf of ONE rank grow if the limit rises from 128 to 4096 tokens a
# rank? Set STRETCH.
