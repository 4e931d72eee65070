"""Each exercise's judge accepts right answers in any form, and names the mistake in wrong ones."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import right_answers as right

from epmoe import device
from epmoe.__main__ import main
from epmoe.lessons import FILES, exercise, exercise5, exercise9, judge
from epmoe.lessons.answers import Wrong, load
from epmoe.lessons.mailbox_model import explore

RIGHT = {
    1: [right.OFFSETS, right.OFFSETS_BY_HAND],
    2: [right.PLACE, right.PLACE_AS_ARRAY],
    3: [right.SLOTS, right.SLOTS_BY_HAND],
    4: [right.CHAIN, right.CHAIN_OF_FENCES, right.CHAIN_OF_ATOMICS],
    5: [right.TWO_BUFFERS, right.BARRIERS],
    6: [right.DECIDE, right.DECIDE_BY_HAND],
    7: [right.DROP, right.DROP_BY_HAND],
    8: [right.BACKWARD, right.BACKWARD_BY_EINSUM],
    9: [right.FINISH, right.FINISH_BY_SEARCH],
    10: [right.FLOORS, right.FLOORS_BY_HAND],
}

# (number, right answer): mistakes in it, each as (text, replacement, ..., words of the verdict)
WRONG = {
    (1, right.OFFSETS): [
        ("[[0], ends]", "[ends]", "the 0 at the front is missing"),
        ("[[0], ends]", "[[0], ends[:-1]]", "the last number is missing"),
        ("axis=1)", "axis=0)", "the sums are over experts"),
        ("np.cumsum(counts.sum(axis=1))", "counts.sum(axis=1)", "not yet added up"),
        ("np.cumsum(counts.sum(axis=1))", "np.cumsum(counts)", "one number for each (expert, rank)"),
        ("ends])", "ends]) + 1", "row_offsets[0] must be 0"),
        ("counts[local_expert, :src_rank].sum()", "0", "ranks before rank 1"),
        (", :src_rank]", ", :src_rank + 1]", "segment ends"),
        ("row_offsets(counts)[local_expert] + ", "", "the local experts before 1 are not counted"),
        ("sum(axis=1)", "sum(axis=1).astype(np.int32)", "32 bits do not hold it"),
        ("sum(axis=1))", "sum(axis=1).astype(float))", "must return whole numbers"),
        ("sum(axis=1))", "sum(axis=1).astype(float)).astype(int)", "a float does not hold"),
        ("ends = np", "counts += 1; counts -= 1; counts[0] = 0; ends = np", "changes its argument 1"),
        ("src_rank].sum()", "src_rank].sum() / 1", "first_row must return whole numbers"),
    ],
    (2, right.PLACE): [
        ("expert // local, ", "expert % n_ranks, ", "not assigned in turn"),
        ("expert % local", "expert", "an axis of LOCAL experts"),
        ("up(4)", "4", "src_info takes 16 bytes"),
        ("up(4)", "4", "up(2 * top_k)", "2 * top_k", "padded to 16 bytes too"),
        ("up(2 * top_k)", "16", "topk_info is as long as top_k=9"),
        ("up(2 * hidden)", "up(4 * hidden)", "2 bytes, not 4"),
        ("* message", "", "the question asks for bytes"),
        ("(le * n_ranks + src_rank)", "(src_rank * local + le)", "the local expert comes first"),
        ("* message", "* message + 1", "the offset must be 0"),
        ("* message", "% (1 << 32) * message % (1 << 32)", "32 bits do not hold it"),
        ("* message", "* message / 1", "must return whole numbers"),
    ],
    (3, right.SLOTS): [
        ("- counts", "", "counts the block's own pairs too"),
        ("axis=0", "axis=1", "sums run over experts"),
        ("np.cumsum(counts, axis=0)", "np.cumsum(counts).reshape(counts.shape)", "over everything"),
        ("np.cumsum(counts, axis=0) - counts", "0 * counts", "every block begins at 0"),
        ("first[e] + same", "same", "the block's first slot is missing"),
        ("first[e] + same", "first[e]", "the same slot as another"),
        ("first[e] + same", "first[e] + same + 1", "one too high"),
        ("if e < 0", "if False", "its answer is -1"),
        ("experts[:i].count(e)", "i", "count only those for expert"),
        ("np.cumsum(counts, axis=0)", "np.cumsum(counts, axis=0, dtype=np.int32)", "has wrapped"),
        ("- counts", "- counts * 1.0", "must return whole numbers"),
    ],
    (3, right.SLOTS_BY_HAND): [("    first = first.copy()\n", "", "own_slots changes its argument 2")],
    (4, right.CHAIN): [
        ("ld_acquire_gpu_i32(finished)", "load_i32(finished)", "waits with a plain load"),
        ("red_add_release_gpu", "red_add_relaxed_gpu", "passes nothing on"),
        ("st_release_sys_i32(flag", "st_relaxed_sys_i32(flag", "passes nothing on"),
        ("st_release_sys_i32(flag", "st_release_gpu_i32(flag", "one GPU and read by another"),
        ("ld_acquire_gpu_i32(ready)", "ld_acquire_cta_i32(ready)", "several blocks of rank 1"),
        ("st_release_gpu_i32(ready", "st_release_sys_i32(ready", "stronger than it must be: line"),
        ("ld_acquire_gpu_i32(fin", "ld_acquire_sys_i32(fin", "ld_acquire_gpu_i32 would do as well"),
        ("red_add_release", "fence_acq_rel_gpu(); red_add_release", "would do as well"),
        ("st_release_sys_i32(flag, 1)", "pass", "this hangs"),
        ("load_i32(message)", "1", "rank 1 read [1, 1, 1]"),
        ("    red_add_release_gpu_i32(finished, 1)\n", "", "send has added 0 to `finished`"),
        ("return load_i32(message)", "load_i32(message)", "read returns None: it must return the message"),
        (
            "store_i32(message, value)\n    red_add_release_gpu_i32(finished, 1)",
            "red_add_release_gpu_i32(finished, 1)\n    store_i32(message, value)",
            "Write first, count after",
        ),
        (
            "while ld_acquire_gpu_i32(finished) != n_messages:\n        pass",
            "pass",
            "signal raises the flag when 2 of 3 messages are counted",
        ),
        ("!= n_messages", "== 0", "signal raises the flag when 2 of 3 messages are counted"),
        ("!= n_messages", "!= 3", "wait for n_messages, not for a number"),
        (
            "while ld_acquire_sys_i32(flag) == 0:\n        pass",
            "pass",
            "receive tells the other blocks before the flag is raised",
        ),
        ("while ld_acquire_gpu_i32(ready) == 0:\n        pass", "pass", "read loads the message before"),
    ],
    (4, right.CHAIN_OF_FENCES): [
        ("fence_acq_rel_gpu()", "fence_acq_rel_sys()", "fence_acq_rel_gpu() would do"),
        ("ld_relaxed_sys", "ld_acquire_sys", "The fence there orders it already"),
    ],
    (5, right.TWO_BUFFERS): [
        ("i % 2", "i % 2 if rounds < 7 else 0", "with 2 ranks, program(7): "),
        ("i % 2", "i % 2 if rounds < 900 else 0", "with 2 ranks, program(1000): "),
        ("i % 2", "0", "over the message of round 1, which rank 1 has not read yet"),
        ('[f"send {b}", f"wait {b}"]', '[f"wait {b}", f"send {b}"]', "nobody can go on"),
        ('f"wait {b}"', 'f"wait {1 - b}"', "nobody can go on"),
        ("i % 2", "i % 3", "there are two buffers"),
        ("range(rounds)", "range(1)", "program(2) sends 1 time; it must send once per round, here 2"),
    ],
    (5, right.BARRIERS): [('"wait 0", "barrier"', '"barrier", "wait 0"', "has not read yet")],
    (5, right.PREFETCHING): [
        ("shortest way there",),
        (
            "wait {(i - 1) % 2}",
            "wait {i % 2}",
            "wants the message of round 1 from rank 1, and reads the message of round 2",
        ),
    ],
    (6, right.DECIDE): [
        ("local = n_experts", "topk_ids[0][:] = 0; local = n_experts", "changes its argument 1"),
        ("* row_bytes", ".astype(np.int32) * np.int32(row_bytes)", "messages of 64 MiB: the floor"),
        ("gbps / 1e3", "gbps", "in nanoseconds"),
        ("out[src, src] = 0", "pass", "crosses no link"),
        ("max(out.sum(0).max(), out.sum(1).max())", "out.sum(1).max()", "only the ways out"),
        ("max(out.sum(0).max(), out.sum(1).max())", "out.sum(0).max()", "only the ways in"),
        ("max(out.sum(0).max(), out.sum(1).max())", "out.sum() / n_ranks", "the busiest one decides"),
        ("owner = np.where(ids < 0, -1, ids // local)", "owner = (ids % n_experts) // local", "counted as an expert"),
        ("here.any(axis=1).sum()", "here.sum()", "the floor of the other layout"),
        ("+ extra_us", "", "so the choice is pairs, not rows"),
        ("extra_us <", "extra_us <=", "equal times mean pairs, so the choice is pairs, not rows"),
        ("/ 1e3", "/ 1e9", "this is in seconds"),
        (
            "out[src, dst] =",
            "out[:, dst] +=",
            "owner == dst",
            "(owner == dst) & (dst != src)",
            "out[src, src]",
            "x",
            "[[0] * n] * n",
        ),
        ("/ 1e3", "/ 1e9", "out[src, src]", "x", "in seconds, and what a rank sends to itself is counted too"),
        ('"rows" if', '"row" if', 'must be "pairs" or "rows"'),
    ],
    (7, right.DROP): [
        ("= -1", "= e", "nothing is dropped"),
        ("return out", "return out if out.size else []", "a batch without tokens"),
        ("where[capacity:]", "where[max(0, capacity - 1):]", "not one fewer"),
        ("where[capacity:]", "where[capacity + 1:]", "one pair too many"),
        ("where[capacity:]", "where[:max(0, len(where) - capacity)]", "the LAST tokens keep"),
        (
            "topk_ids.copy()",
            "topk_ids.T.copy()",
            "topk_ids.reshape",
            "topk_ids.T.reshape",
            "return out",
            "return out.T",
            "all first choices",
        ),
        ("return out", "out[(out < topk_ids).any(axis=1)] = -1; return out", "keeps the others"),
        (
            "where = np.flatnonzero(topk_ids.reshape(-1) == e)",
            "where = np.arange(topk_ids.size)",
            "a capacity of its own",
        ),
        ("= -1", "= 99", "A pair stays as it is"),
        ("topk_ids.copy()", "topk_ids", "changes its argument 1"),
        ("return out", "return out.reshape(-1)", "an array of shape"),
        ("return out", "return out * 1.0", "must return whole numbers"),
        ("in range(n_experts)", "in range(1, n_experts)", "expert 0 keeps 4 pairs"),
    ],
    (7, right.DROP_BY_HAND): [("e >= 0 and room", "room", "takes no room")],
    (8, right.BACKWARD): [
        ("matrix[e].T", "matrix[e]", "not transposed"),
        ("np.outer(x[t], grad_y)", "np.outer(grad_y, x[t])", "It is the transpose"),
        ("gx[t] +=", "gx[t] =", "must be ADDED"),
        ("gm[e] +=", "gm[e] =", "must be ADDED"),
        ("weights[t, k] * grad_out[t]", "grad_out[t]", "weights are missing"),
        ("np.outer(x[t], grad_y)", "np.outer(x[t], grad_out[t])", "weights are missing"),
        ("y @ grad_out[t]", "y @ grad_y", "a factor too many"),
        ("y @ grad_out[t]", "x[t] @ grad_out[t]", "the expert's RESULT"),
        ("np.outer(x[t], grad_y)", "np.outer(y, grad_y)", "by finite differences"),
        ("if e < 0:", "if False:", "-1 means no expert: nothing"),
        ("gx[t] +=", "gx[t] -=", "by finite differences"),
        ("gw[t, k] = y", "gw[t, k] = 0 * y", "It is 0 everywhere"),
        ("return gx, gw, gm", "return gx, gw", "must return three arrays"),
        ("return gx, gw, gm", "return gx, gm, gw", "has shape"),
    ],
    (8, right.BACKWARD_BY_EINSUM): [
        (
            'np.add.at(gm, topk_ids, np.einsum("ti,tk,tj->tkij", x, w, grad_out))',
            'each = np.einsum("ti,tk,tj->tkij", x, w, grad_out)\n'
            "    for k in range(w.shape[1]):\n"
            "        gm[topk_ids[:, k]] += each[:, k]",
            "adds only the last of them",
        )
    ],
    (9, right.FINISH): [
        ("[ends[b] for b in before]", "[]", "`before` are ignored"),
        ('0 if resource == "none" else free.get(resource, 0)', "0", "several at once"),
        ('0 if resource == "none" else ', "", '"none" is no resource'),
        ("max([busy, *ready])", "max(busy, min(ready, default=0))", "not the first of them"),
        ("max([busy, *ready])", "max(busy, ready[-1] if ready else 0)", "not the last of the list"),
        ("max([busy, *ready])", "max(busy, sum(ready))", "may overlap"),
        ("free[resource] = begin + us", "free[resource] = busy + us", "waiting included"),
        ("return ends", "return {t[0]: ends[t[0]] - t[2] for t in tasks}", "BEGIN"),
        ("return ends", "return {t[0]: t[2] for t in tasks}", "These are durations"),
        ("return ends", "return list(ends.values())", "must return a dictionary"),
        ("return ends", "ends.pop('a', 0); return ends", "the result has the names"),
    ],
    (10, right.FLOORS_BY_HAND): [("received[r]", "received[r if way < 2 else src]", "here one receives more")],
    (10, right.FLOORS): [
        ("if dst // h != src // h:", "if True:", "token's own host are counted"),
        ("if dst // h != src // h:", "if dst != src:", "other ranks of the same host"),
        ("max(m.sum(0).max(), m.sum(1).max())", "m.sum(1).max()", "only what cards send"),
        ("max(m.sum(0).max(), m.sum(1).max())", "m.sum(0).max()", "only what cards receive"),
        ("max(m.sum(0).max(), m.sum(1).max())", "m.sum()", "what all cards send together"),
        ("max(m.sum(0).max(), m.sum(1).max())", "m.sum() / n_ranks", "the average card"),
        ("/ 1e3", "", "in nanoseconds"),
        ("/ 1e3", "/ 1e9", "in seconds"),
        ("* row_bytes", "* row_bytes * 8", "not in bits"),
        ("np.where(ids < 0, src, ids // local)", "ids % n_experts // local", "-1 means no expert"),
        (
            "rows[src, dst] = (rank == dst).any(axis=1).sum()",
            "rows[src, dst] = (rank == dst).sum()",
            "this is the floor of pairs",
        ),
        ("dst % h == src % h", "dst % h == 0", "arrive at its first rank"),
        ("(pairs, rows, hosts)]", "(pairs, rows)]", "must return three numbers"),
    ],
}


def mistakes():
    """Each of WRONG: number, right answer, {text: replacement}, words of the verdict."""
    for (number, source), rows in WRONG.items():
        for *edits, says in rows:
            yield pytest.param(number, source, dict(zip(edits[::2], edits[1::2])), says)


def written(tmp_path, source):
    file = tmp_path / "answer.py"
    file.write_text(source)
    return file


@pytest.mark.parametrize("number, source", [(n, source) for n in RIGHT for source in RIGHT[n]])
def test_right_answers_are_accepted(number, source, tmp_path):
    assert exercise(number).judge(load(written(tmp_path, source)))


@pytest.mark.parametrize("number, source, edits, says", list(mistakes()))
def test_wrong_answers_are_told_what_is_wrong(number, source, edits, says, tmp_path):
    for text, new in edits.items():
        assert text in source
        source = source.replace(text, new)
    with pytest.raises(Wrong) as wrong:
        exercise(number).judge(load(written(tmp_path, source)))
    assert says in str(wrong.value), str(wrong.value)


def test_every_exercise_has_right_and_wrong_answers():
    assert set(RIGHT) == set(FILES)
    assert all(sum(wrong.values[0] == n for wrong in mistakes()) >= 6 for n in FILES)


@pytest.mark.parametrize(
    "source, says",
    [
        ("def row_offsets(counts)\n", "line 1 is not Python"),
        ("# coding: none\n", "answer.py is not Python: unknown encoding"),
        ('"""The exercises of lesson 2."""\nplace = 1', "the exercises of lesson 2, and no function row_offsets"),
        ("import nothing_like_it\n", "ModuleNotFoundError while the file was read"),
        ("x = 1\n", "has no function row_offsets"),
        ("def row_offsets(counts):\n    pass\n", "returns None"),
        ("def row_offsets(counts):\n    x = 1\n    return counts[99]\n", "line 3: IndexError in row_offsets("),
        ("def row_offsets(counts):\n    return 'abc'\n", "row_offsets"),
        ("def row_offsets(counts):\n    return [[0, 1], [2]]\n", "must return whole numbers"),
    ],
)
def test_files_that_fail_are_told_where(source, says, tmp_path):
    with pytest.raises(Wrong) as wrong:
        exercise(1).judge(load(written(tmp_path, source)))
    assert says in str(wrong.value), str(wrong.value)


@pytest.mark.parametrize("number", FILES)
@pytest.mark.parametrize("name", ["WARM_UP", "STRETCH"])
def test_numbers_are_judged(number, name):
    asked = getattr(exercise(number), name)
    assert len(asked.looks) >= 3 and all(not asked._is(n, asked.right) for n, _ in asked.looks)
    for value in (asked.right, np.float64(asked.right)):
        assert f"{name} = " in asked.judge(SimpleNamespace(**{name: value}), name)
    for value, says in (
        *asked.looks,
        (asked.right * 3 + 0.25, asked.hint),
        (float("nan"), asked.hint),
        (None, "not answered"),
        ("7", "must be a number"),
        (True, "must be a number"),
        (np.array([5, 6]), "must be a number"),
        ([5], "must be a number, not [5]"),
        ((1, 86), "must be a number, not (1, 86): write a decimal point, not a comma"),
        (10**400, "must be a number"),
    ):
        with pytest.raises(Wrong) as wrong:
            asked.judge(SimpleNamespace(**{name: value}), name)
        assert says in str(wrong.value)


@pytest.mark.parametrize(
    "number, name, given, says",
    [(2, "STRETCH", 14.6e9, "rounded"), (8, "STRETCH", 1.2386e9, "rounded"), (10, "STRETCH", 1.495, "RIGHT")],
)
def test_a_rounded_number_is_right_if_the_question_allows_it(number, name, given, says):
    try:
        said = "RIGHT " + getattr(exercise(number), name).judge(SimpleNamespace(**{name: given}), name)
    except Wrong as error:
        said = str(error)
    assert says in said


def test_a_program_that_sends_ahead_needs_four_buffers():
    right = exercise(5).STRETCH.right

    def program(buffers, rounds=7):
        ahead = [w for i in range(1, rounds) for w in (f"send {i % buffers}", f"wait {(i - 1) % buffers}")]
        return ["send 0", *ahead, f"wait {(rounds - 1) % buffers}"]

    assert [explore(program(n), 2) is None for n in (1, 2, 3, 4, 5)] == [n >= right for n in (1, 2, 3, 4, 5)]


def test_the_least_counter_of_two_threads_with_ten_claims_each():
    """By trying all orders; a thread is (steps done, what its last load saw)."""
    least, seen, todo = 99, set(), [(0, 0, 0, 0, 0)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        a, saw_a, b, saw_b, counter = state
        if a == b == 20:
            least = min(least, counter)
        if a < 20:
            todo.append((a + 1, 0, b, saw_b, saw_a + 1) if a % 2 else (a + 1, counter, b, saw_b, counter))
        if b < 20:
            todo.append((a, saw_a, b + 1, 0, saw_b + 1) if b % 2 else (a, saw_a, b + 1, counter, counter))
    assert least == exercise(3).STRETCH.right


def test_the_outcomes_of_two_stores_and_two_loads():
    @device.kernel
    def store_and_load(params, call, my_rank):
        device.st_release_sys_i32(params + 64 * my_rank, 1)
        seen = device.ld_acquire_sys_i32(params + 64 * (1 - my_rank))
        device.store_i32(params + 128 + 4 * my_rank, seen)

    outcomes = set()
    for seed in range(100):
        machine = device.machine(2, seed=seed, stale=True)
        memory = machine.alloc(256, "memory")
        memory.fill(0)
        for rank in (0, 1):
            machine.launch(store_and_load, 1, 1, (memory.address, 0, rank), stream=machine.stream(rank))
        outcomes.add(tuple(memory.read(np.int32, 2, 128).tolist()))
        memory.free()
    assert len(outcomes) == exercise(4).STRETCH.right


def test_no_other_order_of_two_microbatches_is_faster():
    from itertools import permutations

    steps = (("a", "compute", 50), ("d", "link", 20), ("e", "compute", 20), ("c", "link", 30))
    tasks = [
        (batch + name, resource, us, [batch + steps[i - 1][0]] if i else [])
        for batch in "AB"
        for i, (name, resource, us) in enumerate(steps)
    ]

    def end(order):
        seen = {n: i for i, (n, *_) in enumerate(order)}
        if all(seen[b] < seen[n] for n, *_, before in order for b in before):
            return max(exercise9.finish(order).values())
        return float("inf")

    assert min(map(end, permutations(tasks))) == exercise(9).STRETCH.right


def complete(number, source):
    """A file with right numbers and this core."""
    asked = exercise(number)
    return f"WARM_UP = {asked.WARM_UP.right}\n{source}\nSTRETCH = {asked.STRETCH.right}\n"


def test_check_says_a_verdict_of_each_part(capsys, tmp_path):
    file = written(tmp_path, complete(1, right.OFFSETS))
    assert main(["lesson", "1", "--check", str(file)]) == 0
    told = capsys.readouterr().out
    assert [told.count(word) for word in ("RIGHT  ", "warm-up: ", "core: ", "stretch: ")] == [3, 1, 1, 1]
    file = written(tmp_path, f"warm_up = 5\n{right.OFFSETS}\nSTRETCH = 2")
    assert main(["lesson", "1", "--check", str(file)]) == 1
    told = capsys.readouterr().out
    assert "WARM_UP is not answered: write WARM_UP = and your number, not warm_up." in " ".join(told.split())
    assert "RIGHT    core: " in told and "NOT YET  stretch: STRETCH = 2: two experts" in told


def test_the_verdict_as_json(capsys, tmp_path):
    file = written(tmp_path, "print('something')\n" + complete(1, right.OFFSETS))
    for number, passes in ((1, [True, True, True]), (2, [False, False, False])):
        status = main(["lesson", str(number), "--check", str(file), "--json"])
        record = json.loads(capsys.readouterr().out)
        assert status == (not record["passed"]) and record["passed"] == all(passes)
        assert record["exercise"] == number
        assert [part["part"] for part in record["parts"]] == ["warm-up", "core", "stretch"]
        assert [part["passed"] for part in record["parts"]] == passes
        assert all(part["verdict"] for part in record["parts"])


def test_a_slow_start_is_not_the_answers_fault(monkeypatch, tmp_path):
    (tmp_path / "slow_judge.py").write_text(
        "import time\nfrom epmoe import guard\ntime.sleep(1)\n"
        "guard.child(lambda task, say: (say(['begun', '']), say(['right', task])))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert judge.verdict_of("slow_judge", "fine", patience_s=0.5) == ("right", "fine")


def test_files_beside_an_answer_do_not_hide_installed_modules(monkeypatch, tmp_path):
    for name in ("numpy", "greenlet", "random"):
        (tmp_path / f"{name}.py").write_text("WARM_UP = None\n")
    (tmp_path / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as of the command epmoe
    file = written(tmp_path, "import helper\nWARM_UP = 5\n")
    assert [what for _, what, _ in judge.verdicts(4, str(file))] == ["wrong"] * 3
    assert judge.verdicts(1, str(file))[0][:2] == ("warm-up", "right")


def test_without_an_answer_there_is_no_verdict(capsys, tmp_path):
    for argv, says in (
        (["1", "--check", str(tmp_path / "nothing.py")], "lesson 1 --start"),
        (["1", "--json"], "--check"),
        (["1", "--check", str(tmp_path)], "is not a file"),
        (["1", "--check", "/proc/self/mem"], "/proc/self/mem cannot be read: Input/output error"),
        (["--check"], "need a number"),
    ):
        assert main(["lesson", *argv]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "body, says",
    [
        ("while True:\n        time.sleep(1)", "seconds, at answer.py line 7: is there a loop that does not end?"),
        ("return input()", "line 6: EOFError in program(1)"),
        ("import os; os._exit(0)", "ended the process with exit"),
        ("import os; os.abort()", "crashed the process"),
        ("raise SystemExit(0)", "SystemExit in program(1)"),
    ],
)
@pytest.mark.by_day(2)
def test_an_answer_that_does_not_return_is_wrong(capsys, monkeypatch, tmp_path, body, says):
    assert judge.PATIENCE_S <= 10
    if "while" in body:
        monkeypatch.setattr(judge, "PATIENCE_S", 3)
    file = written(tmp_path, f"import time\nWARM_UP = 264\nSTRETCH = 4\n\ndef program(rounds):\n    {body}\n")
    assert main(["lesson", "5", "--check", str(file)]) == 1
    told = " ".join(capsys.readouterr().out.split())
    at = [told.index(words) for words in ("RIGHT warm-up: ", "NOT YET core: ", "RIGHT stretch: ")]
    assert says in told and at == sorted(at)


def test_a_file_that_cannot_be_read_has_one_verdict(capsys, tmp_path):
    file = written(tmp_path, "WARM_UP = \n")
    assert main(["lesson", "5", "--check", str(file)]) == 1
    assert capsys.readouterr().out.startswith("NOT YET  the file: answer.py line 1 is not Python")


def test_a_program_without_barriers_is_praised_more(monkeypatch, tmp_path):
    monkeypatch.setattr(exercise5, "WORLDS", ((2, 5), (3, 3)))
    assert "no barrier is needed" in exercise(5).judge(load(written(tmp_path, right.TWO_BUFFERS)))
    assert "a way without any" in exercise(5).judge(load(written(tmp_path, right.BARRIERS)))
