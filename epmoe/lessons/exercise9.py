"""Exercises of lesson 9: when tasks end that share resources."""

from epmoe.lessons.answers import Wrong, call
from epmoe.lessons.number_questions import Number

STUB = '''
def finish_times(tasks):
    """tasks: [(name, resource, us, names before)]. Returns {name: end in us}."""
    ...
'''

WARM_UP = Number(
    8 + 50 * 20,
    "the device is slower, so it never waits after the first launch: 8 us and then 50 kernels.",
    (
        (1000, "the first kernel cannot begin before it has been launched."),
        (50 * 28, "launches and kernels overlap: the host goes on while the device works."),
        (400, "that is when the host has launched all of them."),
        (420, "kernels run one after another, 20 us each."),
        (28, "there are 50 kernels."),
    ),
    "which of the two clocks is slower, and what happens before it starts?",
)


def finish(tasks, *, before=True, resources=True, none=True, blocks=True, pick=max, shown=lambda begin, end: end):
    """{name: end}; each option makes one of the usual mistakes."""
    free, ends, out = {}, {}, {}
    for name, resource, us, names in tasks:
        ready = [ends[b] for b in names] if before else []
        busy = free.get(resource, 0) if resources and not (none and resource == "none") else 0
        begin = max(busy, pick(ready) if ready else 0)
        ends[name] = begin + us
        out[name] = shown(begin, begin + us)
        free[resource] = begin + us if blocks else busy + us
    return out


CASES = (
    ("one after the other", [("a", "compute", 5, []), ("b", "compute", 7, []), ("c", "link", 2, ["b"])]),
    ("two resources", [("a", "compute", 5, []), ("b", "link", 7, [])]),
    ("a task before", [("a", "compute", 5, []), ("b", "link", 7, ["a"]), ("c", "compute", 1, [])]),
    ("a task that blocks its resource", [
        ("a", "compute", 9, []),
        ("b", "link", 2, ["a"]),
        ("c", "link", 3, []),
    ]),
    ("two tasks before", [
        ("a", "compute", 9, []),
        ("b", "link", 2, []),
        ("c", "x", 1, ["a", "b"]),
        ("d", "y", 1, ["b", "a"]),
    ]),
    ("no resource", [
        ("a", "none", 5, []),
        ("b", "none", 7, []),
        ("c", "none", 1, ["b"]),
        ("d", "link", 2, []),
    ]),
    ("a chain through time", [("a", "x", 3, []), ("b", "y", 4, ["a"]), ("c", "z", 5, ["b"])]),
    ("nothing", []),
    ("two microbatches", [
        ("Aa", "compute", 50, []),
        ("Ba", "compute", 50, []),
        ("Ad", "link", 20, ["Aa"]),
        ("Bd", "link", 20, ["Ba"]),
        ("Ae", "compute", 20, ["Ad"]),
        ("Be", "compute", 20, ["Bd"]),
        ("Ac", "link", 30, ["Ae"]),
        ("Bc", "link", 30, ["Be"]),
        ("end", "none", 1, ["Ac", "Bc"]),
    ]),
)  # fmt: skip

STRETCH = Number(
    finish(CASES[-1][1])["Bc"],
    "both attentions end at 100 us; then the link carries dispatch of B, combine of A and combine of B.",
    (
        (240, "this is one microbatch after the other."),
        (140, "compute is busy that long, but after the last experts a combine follows."),
        (120, "this is one microbatch alone."),
        (170, "the two combines share the link: combine of B begins when combine of A has ended."),
        (200, "Close: the combine of A can travel while the experts of B compute."),
        (210, "Close: let both attentions run before the experts of A."),
        (220, "Close: let both attentions run before the experts of A."),
        (160, "experts cannot begin before their dispatch has ended."),
    ),
    "draw two lines, compute and link: attention of A, attention of B, experts of A, experts of B.",
)


def judge(answer):
    """What was right; raises Wrong."""
    for name, tasks in CASES:
        _one(name, tasks, call(answer, "finish_times", tasks))
    return (
        f"all tasks end when they must in {len(CASES)} programs. Now let it find the answer to STRETCH: try the orders "
        "of the tasks on each resource."
    )


def _one(name, tasks, got):
    right = finish(tasks)
    if not isinstance(got, dict):
        raise Wrong(f"finish_times must return a dictionary {{name: end}}, not {got!r}")
    if set(got) != set(right):
        raise Wrong(f"{name}: the result has the names {sorted(got)}; they must be {sorted(right)}")
    try:
        got = {task: float(end) for task, end in got.items()}
    except (TypeError, ValueError):
        raise Wrong(f"{name}: the ends must be numbers, not {got!r}") from None
    if got == right:
        return
    task = next(n for n in right if got[n] != right[n])
    shown = f"{name}: {task} ends at {got[task]:g} and must end at {right[task]:g}."
    for looks, says in _looks(tasks):
        if looks == got:
            raise Wrong(f"{shown} {says} The tasks are {tasks}")
    raise Wrong(f"{shown} The tasks are {tasks}")


def _looks(tasks):
    return (
        (finish(tasks, before=False), "The tasks in `before` are ignored."),
        (finish(tasks, resources=False), "A resource runs one task at a time; here it runs several at once."),
        (finish(tasks, none=False), 'The resource "none" is no resource: its tasks do not wait for each other.'),
        (finish(tasks, pick=min), "ALL tasks in `before` must have ended, not the first of them."),
        (finish(tasks, pick=lambda r: r[-1]), "ALL tasks in `before` must have ended, not the last of the list."),
        (finish(tasks, pick=sum), "Tasks in `before` may overlap: the latest end counts, not the sum."),
        (
            finish(tasks, blocks=False),
            "A resource is busy until its task ends, waiting included: tasks keep their order.",
        ),
        (finish(tasks, shown=lambda begin, end: begin), "These are the times at which tasks BEGIN."),
        (
            finish(tasks, shown=lambda begin, end: end - begin),
            "These are durations; the end counts from the beginning of all.",
        ),
    )
