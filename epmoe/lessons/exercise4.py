"""Exercises of lesson 4: the weakest orders and scopes that suffice for the chain message, counter, flag, ready flag."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from epmoe import device
from epmoe.device.intrinsics import INTRINSICS
from epmoe.lessons.answers import Wrong, failed, function
from epmoe.lessons.number_questions import Number
from epmoe.mutants.plain_atomics import PLAIN_ATOMICS
from epmoe.mutants.token_mutations import NARROWER, mutants_of
from epmoe_ref.errors import DeadlockError, EPError, OutOfBoundsError, RaceError

STUB = '''
from epmoe.device import *      # all intrinsics


def send(message, finished, value):
    """Blocks 1 to 3 of rank 0: write a message into the memory of rank 1, and count it."""
    store_i32(message, value)
    red_add_relaxed_cta_i32(finished, 1)


def signal(finished, flag, n_messages):
    """Block 0 of rank 0: when all messages are counted, raise the flag of rank 1."""
    while ld_relaxed_cta_i32(finished) != n_messages:
        pass
    st_relaxed_cta_i32(flag, 1)


def receive(flag, ready):
    """Block 0 of rank 1: wait for the flag, then tell the other blocks."""
    while ld_relaxed_cta_i32(flag) == 0:
        pass
    st_relaxed_cta_i32(ready, 1)


def read(ready, message):
    """Blocks 1 to 3 of rank 1: wait until they are told, then read a message."""
    while ld_relaxed_cta_i32(ready) == 0:
        pass
    return load_i32(message)
'''

WARM_UP = Number(
    4,
    "both scopes must be gpu or sys.",
    (
        (1, "sys with sys is right, but gpu includes both blocks as well."),
        (2, "gpu and sys may be mixed: each scope only has to include the other thread."),
        (9, "cta holds the threads of one block only, and these are two."),
        (5, "one half in scope cta is as good as nothing."),
        (8, "one half in scope cta is as good as nothing."),
        (6, "BOTH scopes must include the other thread."),
    ),
    "which scopes include a thread of another block of the same GPU? Both need one of these.",
)
STRETCH = Number(
    4,
    "earlier operations cannot move behind a release, and later ones cannot move ahead of an acquire. Neither stops an "
    "earlier store from passing a later load of another place, so both may load 0. That takes a sequentially consistent "
    "fence.",
    (
        (
            3,
            "this forbids that both load 0. What would? A release orders what is BEFORE it, an acquire what is "
            "AFTER it; here the store comes first and the load second.",
        ),
        (2, "each rank can be first, and they can also overlap."),
        (1, "each rank can be first, and they can also overlap."),
    ),
    "go through 00, 01, 10 and 11, and look for what forbids each.",
)

WRITERS, SEEDS = 3, (None, *range(8))
SENT = [10, 20, 30]  # a message of each writer
NAMES = ("send", "signal", "receive", "read")
FENCE = re.compile(r"fence_acq_rel_(sys|gpu)\b")
HINTS = (
    (r"data race on finished.*scopes", "the counter is used by several blocks of rank 0: which scope includes them?"),
    (r"data race on ready.*scopes", "the ready flag is used by several blocks of rank 1: which scope includes them?"),
    (r"data race on flag.*scopes", "the flag is written by one GPU and read by another: which scope includes both?"),
    (
        r"data race on (finished|flag|ready).*plain access",
        "what threads look at while others write needs a strong access (ld_, st_, red_add_) on both sides.",
    ),
    (
        r"data race on message",
        "some link of the chain passes nothing on. Follow it from the message's store to its "
        "load: each store or add on the way must release, each load acquire.",
    ),
)


def judge(answer):
    """What was right; raises Wrong."""
    parties = [function(answer, name) for name in NAMES]
    source = Path(answer.__file__).read_text(encoding="utf-8")
    for loop in ast.walk(ast.parse(source)):
        if isinstance(loop, ast.While) and re.search(r"\bload_\w+\(", ast.unparse(loop.test)):
            raise Wrong(
                f"line {loop.lineno} waits with a plain load, which need not see what others store, however often it is "
                "repeated: look with an ld_ intrinsic."
            )
    _each_alone(answer, *parties)
    _expect_silence(answer, parties)
    weaker = list(_weaker(Path(answer.__file__).name, source))
    for mutant in weaker:
        if not _fails(_parties_of(mutant.apply(source), answer.__file__)):
            fenced = mutant.kind == "order" and "fence_" in inspect.getsource(getattr(answer, mutant.token.function))
            ask = (
                "The fence there orders it already." if fenced else "Who reads what is written there, and how far away?"
            )
            raise Wrong(
                f"nothing races, and the messages arrive; but something is stronger than it must be: line "
                f"{mutant.token.line}, in {mutant.token.function}: {mutant.change} would do as well. {ask}"
            )
    return (
        f"no race under {len(SEEDS)} schedules, and each of the {len(weaker)} ways to weaken an intrinsic was noticed: "
        "nothing is missing and nothing is superfluous."
    )


def _each_alone(answer, send, signal, receive, read):
    """Each function by itself: none may go on before what it waits for has come, and a message comes before its count."""
    ended, words = _alone(answer, lambda w: signal(w.finished, w.flag, WRITERS), finished=WRITERS - 1)
    if words.flag:
        raise Wrong(
            f"signal raises the flag when {WRITERS - 1} of {WRITERS} messages are counted: it must wait for "
            "all of them first."
        )
    if ended:
        raise Wrong(f"signal returns when {WRITERS - 1} of {WRITERS} messages are counted: it must wait for all.")
    ended, words = _alone(answer, lambda w: signal(w.finished, w.flag, 2), finished=2)
    if not ended:
        raise Wrong(
            "signal still waits when 2 messages are counted and n_messages is 2: wait for n_messages, not for "
            "a number of your own."
        )
    ended, words = _alone(answer, lambda w: receive(w.flag, w.ready))
    if words.ready:
        raise Wrong("receive tells the other blocks before the flag is raised: it must wait for the flag first.")
    if ended:
        raise Wrong("receive returns before the flag is raised: it must wait for it.")
    ended, words = _alone(answer, lambda w: read(w.ready, w.nowhere))
    if ended or ended is None:
        raise Wrong(
            f"read {'returns' if ended else 'loads the message'} before it is told that it may: it must wait "
            "for the ready flag first."
        )
    ended, words = _alone(answer, lambda w: send(w.nowhere, w.finished, 7))
    if words.finished:
        raise Wrong(
            "send counts its message before it has written it: whoever sees the count may read what was there "
            "before. Write first, count after."
        )
    _, words = _alone(answer, lambda w: send(w.message, w.finished, 7))
    if words.finished != 1:
        raise Wrong(f"send has added {words.finished} to `finished`: it must add 1 when its message is written.")
    given = []
    _alone(answer, lambda w: given.append(read(w.finished, w.message)), finished=1)
    if given == [None]:
        raise Wrong("read returns None: it must return the message that it has loaded.")


def _alone(answer, called, finished=0):
    """(ended, words) after one thread has called a function: ended is False if it waits, None if it went to `nowhere`."""
    machine = device.machine(1, seed=0)
    memory = machine.alloc(256, "memory", 0)
    places = {name: memory.address + 64 * i for i, name in enumerate(("finished", "flag", "ready", "message"))}

    @device.kernel
    def alone(params, num_tokens, my_rank):
        called(SimpleNamespace(**places, nowhere=64))

    ended = True
    try:
        memory.fill(0)
        memory.write(np.array([finished], np.int32), 0)
        machine.launch(alone, 1, 1, (memory.address, 0, 0), stream=machine.stream(0))
        try:
            machine.synchronize()
        except DeadlockError:
            ended = False
        except OutOfBoundsError:
            ended = None
        except Exception as error:
            raise Wrong(failed(answer.__file__, error, "in a kernel")) from None
        after = memory.read(np.int32, 64, 0)
        return ended, SimpleNamespace(finished=after[0], flag=after[16], ready=after[32])
    finally:
        memory.free()


def _kernel(send, signal, receive, read):
    @device.kernel
    def chain(params, num_tokens, my_rank):
        finished, flag = params, device.load_u64(params + 64)
        block, ready, message = device.block_idx(), flag + 4, flag + 64
        if my_rank == 0 and block == 0:
            signal(finished, flag, WRITERS)
        elif my_rank == 0:
            send(message + 4 * (block - 1), finished, 10 * block)
        elif block == 0:
            receive(flag, ready)
        else:
            device.store_i32(message + 60 + 4 * block, read(ready, message + 4 * (block - 1)))

    return chain


def _run(kern, seed):
    machine = device.machine(2, seed=seed, racecheck=True)
    near = machine.alloc(
        256,
        "finished",
        0,
        regions=[("finished", 0, (1,), np.int32, ("word",)), ("address of rank 1", 64, (1,), np.uint64, ("word",))],
    )
    far = machine.alloc(
        256,
        "memory",
        1,
        regions=[
            ("flag", 0, (1,), np.int32, ("word",)),
            ("ready", 4, (1,), np.int32, ("word",)),
            ("message", 64, (WRITERS,), np.int32, ("number",)),
            ("received", 128, (WRITERS,), np.int32, ("number",)),
        ],
    )
    try:
        near.fill(0)
        far.fill(0)
        near.write(np.array([far.address], np.uint64), 64)
        for rank in (0, 1):
            machine.launch(kern, 1 + WRITERS, 1, (near.address, 0, rank), stream=machine.stream(rank))
        machine.synchronize()
        return far.read(np.int32, WRITERS, 128).tolist()
    finally:
        near.free()
        far.free()


def _fails(parties):
    """Whether anything goes wrong with these functions under some schedule."""
    try:
        return any(_run(_kernel(*parties), seed) != SENT for seed in SEEDS)
    except Exception:  # a weakened intrinsic may fail in any way: all count
        return True


def _expect_silence(answer, parties):
    for seed in SEEDS:
        try:
            got = _run(_kernel(*parties), seed)
        except RaceError as error:
            text = str(error)
            hint = next((says for pattern, says in HINTS if re.search(pattern, text, re.DOTALL)), "")
            raise Wrong(f"{hint or 'there is a race.'}\n{text}") from None
        except DeadlockError as error:
            raise Wrong(f"this hangs: a wait never ends. Keep the loops as they were.\n{error}") from None
        except EPError as error:
            raise Wrong(f"{type(error).__name__}: {error}") from None
        except Exception as error:
            raise Wrong(failed(answer.__file__, error, "in a kernel")) from None
        if got != SENT:
            raise Wrong(
                f"rank 1 read {got} and must read {SENT}: change orders and "
                "scopes only, each function must still store, count, wait and raise the flag."
            )


def _weaker(file, source):
    """The mutants of the four functions: every intrinsic made weaker in every way, fences by scope too."""
    for mutant in mutants_of(file, source):
        if mutant.token.function in NAMES and mutant.kind in ("order", "scope", "plain", "barrier"):
            yield mutant
            fence = FENCE.match(mutant.token.text)
            for scope in NARROWER[fence[1]] if fence else ():
                yield replace(mutant, new=f"fence_acq_rel_{scope}()")


def _parties_of(source, file):
    names = {**{word: getattr(device, word) for word in INTRINSICS}, **PLAIN_ATOMICS}
    exec(compile(source, str(file), "exec"), names)
    return [names[name] for name in NAMES]
