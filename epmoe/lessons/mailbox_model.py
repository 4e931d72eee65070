"""Tries every order in which ranks can run a program of sends and waits over shared mailboxes.

Each rank has some buffers, each with a mailbox for every peer: a message, and a word that says whether it has arrived.
Steps: "send b" writes the next round's message into buffer b of every peer and then raises its word there; "wait b"
waits for the words of all peers in this rank's buffer b, reads their messages and resets the words; "barrier" waits
until every rank has reached it. The i-th send of a rank carries round i, and its i-th wait expects round i.
"""

from collections import deque


def parts(program, rank, n_ranks):
    """[(step's number, what, peer, buffer, round)]: the program of a rank in indivisible steps."""
    out, sent, waited = [], 0, 0
    peers = [p for p in range(n_ranks) if p != rank]
    for i, step in enumerate(program):
        word, _, buffer = step.partition(" ")
        if word == "barrier":
            out.append((i, "barrier", None, None, None))
        elif word == "send":
            sent += 1
            out += [(i, what, p, buffer, sent) for p in peers for what in ("write", "raise")]
        else:
            waited += 1
            out += [(i, what, p, buffer, waited) for what in ("see", "read", "put back") for p in peers]
    return out


class Fault(Exception):
    """The step just tried does harm; the message says what."""


def _after(part, rank, boxes):
    """The mailboxes after a step, or None if it must wait. boxes: {(owner, buffer, src_rank): (message, read?, word)}.

    No word is raised while it still stands: its message could be unread too, so the write before it is a Fault.
    """
    _, what, peer, buffer, number = part
    key = (peer, buffer, rank) if what in ("write", "raise") else (rank, buffer, peer)
    message, was_read, up = boxes.get(key, (0, True, False))
    if what == "write":
        if not was_read:
            raise Fault(
                f"rank {rank} writes its message of round {number} over the message of round {message}, which rank "
                f"{peer} has not read yet"
            )
        new = number, False, up
    elif what == "raise":
        new = message, was_read, True
    elif what == "see":
        return boxes if up else None
    elif what == "read":
        if message != number:
            raise Fault(
                f"rank {rank} wants the message of round {number} from rank {peer}, and reads the message of round "
                f"{message}"
            )
        new = message, True, up
    else:
        new = message, was_read, False
    return {**boxes, key: new}


def explore(program, n_ranks):
    """None if every order of steps ends well, else (what is wrong, the steps that lead there: [(rank, part)])."""
    todo = [parts(program, rank, n_ranks) for rank in range(n_ranks)]
    start = ((0,) * n_ranks, ())
    came_from, queue = {start: None}, deque([start])
    while queue:
        state = queue.popleft()
        at, boxes = state[0], dict(state[1])
        moved = False
        for rank in range(n_ranks):
            if at[rank] == len(todo[rank]):
                continue
            part = todo[rank][at[rank]]
            if part[1] == "barrier":
                # all go on together; counted for rank 0 only
                together = all(i < len(t) and t[i][:2] == part[:2] for i, t in zip(at, todo))
                after = (tuple(i + 1 for i in at), boxes) if together and rank == 0 else None
                moved |= together
            else:
                try:
                    new = _after(part, rank, boxes)
                except Fault as fault:
                    return str(fault), [*_path(came_from, state), (rank, part)]
                after = None if new is None else (at[:rank] + (at[rank] + 1,) + at[rank + 1 :], new)
            if after is None:
                continue
            moved, reached = True, (after[0], tuple(sorted(after[1].items())))
            if reached not in came_from:
                came_from[reached] = (state, rank, part)
                queue.append(reached)
        if not moved and any(i < len(t) for i, t in zip(at, todo)):
            stuck = [rank for rank in range(n_ranks) if at[rank] < len(todo[rank])]
            waits = "; ".join(f'rank {r} at "{program[todo[r][at[r]][0]]}"' for r in stuck)
            return f"nobody can go on: {waits}", _path(came_from, state)
    return None


def _path(came_from, state):
    steps = []
    while came_from[state] is not None:
        state, rank, part = came_from[state]
        steps.append((rank, part))
    return steps[::-1]


def told(program, path):
    """The steps of a path as lines in the order in which they were begun: "rank 0  send 0  (round 2)"."""
    begun = dict.fromkeys((rank, i, number) for rank, (i, *_, number) in path)
    return "\n".join(
        f"  {'all   ' if program[i] == 'barrier' else f'rank {rank}'}  {program[i]}"
        + (f"  (round {number})" if number else "")
        for rank, i, number in begun
    )
