"""The text of a race report: the place, the two accesses, and the missing synchronisation.

A barrier, a release, a wait or a wider scope may be missing. The report also names the closest synchronisation, if any.
"""

WORD_OF_SCOPE = ("weak", "cta", "gpu", "sys")
SHMEM = ("shmem_put_nbi_warp", "shmem_signal_set")


def line_of(code, place):
    """Line number of an instruction."""
    return next((line for start, end, line in code.co_lines() if start <= place < end and line), code.co_firstlineno)


def site(code, place):
    """Where an instruction is: "fan_out.py:63"."""
    return "%s:%d" % (code.co_filename.rpartition("/")[2], line_of(code, place))


def place_of(access):
    """ "row_copy.py:12 store16, called from dispatch.py:88": where an access is."""
    _, _, _, _, _, _, word, code, place, caller, caller_place, _ = access
    text = "%s %s" % (site(code, place), word)
    from .threads import DEVICE_FOLDER

    if not caller.co_filename.startswith(DEVICE_FOLDER):
        text += " (called from %s)" % site(caller, caller_place)
    return text


def who(actor):
    """The rank, block, warp, lane and launch of an actor."""
    name = "rank %d block %d warp %d lane %d of %s" % (
        actor.rank,
        actor.block.index,
        actor.tid >> 5,
        actor.tid & 31,
        actor.launch,
    )
    if actor.word:
        return ("the network for " if actor.word in SHMEM else "the bulk copy issued by ") + name
    return name


def line(number, access):
    """One access of a report, numbered."""
    return "  %d. %-5s %s\n     by %s" % (number, what(access), place_of(access), who(access[0]))


def describe(span, access, other):
    """The first byte that both accesses touch, in the layout's terms."""
    return span.describe(max(access[3], other[3]))


def text(detector, first, second, span, kind):
    """The whole report."""
    out = [
        "data race on %s: the %s at %s is not ordered after the %s at %s"
        % (
            describe(span, second, first),
            what(second),
            site(second[7], second[8]),
            what(first),
            site(first[7], first[8]),
        ),
        line(1, first),
        line(2, second),
    ]
    out += ["  " + reason for reason in missing(detector, first, second, kind)]
    if kind is None and not (first[2] and second[2]):  # otherwise no synchronisation is missing
        pairs = closest(detector, first, second)
        out += ["  did not synchronise: " + pair for pair in pairs]
        if not pairs:
            out += ["  " + release for release in nearest_release(detector, first, second)]
    return "\n".join(out)


def what(access):
    """ "write" or "read"."""
    return "write" if access[5] else "read"


def with_host(access, span, write, at):
    """The report of a race between a launch and the host, which accessed the memory at the line `at`."""
    return (
        "data race on %s\n%s\n  2. %s %s\n     by the host while the launch was in flight: move it before the launch, or "
        "call synchronize() first" % (span.describe(access[3]), line(1, access), "write" if write else "read ", at)
    )


def unfinished_store(actor):
    """The report of a thread that ended before its bulk stores had read their source."""
    return (
        "data race on shared memory of rank %d block %d\n"
        "  %s ended while its bulk stores may still read shared memory\n"
        "  bulk_commit and bulk_wait_read (or bulk_wait) are missing after the last bulk_store"
        % (actor.rank, actor.block.index, who(actor))
    )


def unfinished_put(actor):
    """The report of a thread that ended before its put was complete."""
    return (
        "data race on the source and target of a put\n"
        "  %s ended while its part of a put may still be on its way\n"
        "  shmem_quiet in every lane of its warp is missing after the last shmem_put_nbi_warp" % who(actor)
    )


def same_warp(a, b):
    """True if two threads are in one warp."""
    return a.block is b.block and a.tid >> 5 == b.tid >> 5


def missing(detector, first, second, kind):
    """Which ordering is missing, as far as the clocks tell."""
    u, t = first[0], second[0]
    if kind == "order":
        return [
            "both are strong stores, of different values, and nothing says which of them comes last: the second's "
            "thread must have acquired something that the first's released later, or have seen its value; or use an "
            "atomic"
        ]
    if kind == "nc":
        return [
            "load16_nc may return what was there when the launch began: the write came later, and is ordered "
            "before the load only inside the kernel; use load16"
        ]
    if kind == "later":
        return [
            "load16_nc needs bytes that nobody writes until its launch has ended: the write comes too early, "
            "whatever orders it; use load16"
        ]
    if kind == "proxy":
        return [
            "the write is ordered before the bulk copy was issued, but not for the async proxy: fence_proxy_async "
            "is missing between the two"
        ]
    if u.word == "shmem_put_nbi_warp":
        return [
            "nobody knows the put to be complete at the second access: shmem_quiet in every lane of its warp is "
            "missing, or the order from there to the second access"
        ]
    if u.word and u.word not in SHMEM:
        wait = (
            "mbar_try_wait of its phase is missing, or mbar_expect_tx of its bytes before that phase ended"
            if u.word == "bulk_load"
            else "bulk_commit and %s by its thread are missing" % ("bulk_wait" if first[5] else "bulk_wait_read")
        )
        return [
            "nobody has waited for the bulk copy before the second access: %s, or the order from there to the second "
            "access" % wait
        ]
    if first[2] and second[2]:
        if first[3] != second[3] or first[4] != second[4]:
            return ["both are strong, but differ in address or size"]
        return [
            "both are strong, but the scopes %s and %s do not include each other's thread: both need scope %s"
            % (WORD_OF_SCOPE[first[2]], WORD_OF_SCOPE[second[2]], "gpu or sys" if u.rank == t.rank else "sys")
        ]
    if first[2] or second[2]:
        return [
            "one of them is a plain access: a word that threads share while they run needs a strong load, store or "
            "atomic on both sides, or an order between the two"
        ]
    mates = t.block.actors
    if u.block is t.block:
        group, name = ("warp", "syncwarp or syncthreads") if same_warp(u, t) else ("block", "syncthreads")
        if first[5] and second[5] and first[7:9] == second[7:9]:
            return ["both are in one %s, and both write here: only one of them should, or use an atomic" % group]
        advice = ""
        if t.word == "bulk_load":
            advice = "; if the first access is meant to find the copied bytes, it must come after mbar_try_wait"
        elif first[5] != second[5] and site(*first[7:9]) == site(*second[7:9]):
            advice = "; if they all add to one number, use an atomic"
        return ["both are in one %s, and nothing orders them: a %s between them would%s" % (group, name, advice)]
    informed = next((v for v in mates if v is not t and v.known[u.idx] >= first[1]), None)
    if informed is not None:
        return [
            "warp %d lane %d of the second access's block is ordered after the first access: a %s is missing on "
            "the second's side"
            % (informed.tid >> 5, informed.tid & 31, "syncwarp" if same_warp(informed, t) else "syncthreads")
        ]
    known = t.known
    if known[u.idx] >= u.start:
        return [
            "the second access is ordered after earlier operations of the first access's thread, but not after "
            "this one: the release comes before it" + acquired_from(detector, u, known)
        ]
    heard_of = [v for v in u.launch.actors if v is not u and v.block is not t.block and known[v.idx] >= v.start]
    lane = next((v for v in heard_of if same_warp(v, u)), None)
    warp = next((v for v in heard_of if v.block is u.block), None)
    block = next((v.block.index for v in heard_of), None)
    if lane is not None:
        return [
            "the second access is ordered after another lane of the first access's warp (lane %d): a syncwarp or "
            "syncthreads is missing before its release%s" % (lane.tid & 31, acquired_from(detector, lane, known))
        ]
    if warp is not None:
        return [
            "the second access is ordered after another warp of the first access's block (warp %d): a syncthreads "
            "is missing before its release%s" % (warp.tid >> 5, acquired_from(detector, warp, known))
        ]
    if block is not None:
        return [
            "the second access is ordered after another block of the first access's launch (block %d): no release "
            "and acquire lead from the first access's block to the second access" % block
        ]
    of = "block" if u.launch is t.launch else "launch"
    return ["the second access's thread has acquired nothing from the first one's %s" % of]


def releases(detector):
    """Every release that some thread could still acquire: (location, head)."""
    return [(location, head) for location in detector.locations.values() for head in location.heads.values()]


def acquired_from(detector, v, known):
    """ ", namely LINE": the last release of actor v acquired by a thread with this knowledge, if it is still known."""
    heads = [h for _, h in releases(detector) if h[0] is v and h[2][v.idx] <= known[v.idx]]
    return ", %s" % release_in(max(heads, key=lambda h: h[2][v.idx])) if heads else ""


def release_in(head):
    """Where a release is: at a releasing access, or at the fence before a relaxed one."""
    return ("the fence before " if "relaxed" in head[3][6] else "") + place_of(head[3])


def nearest_release(detector, first, second):
    """If the second access's thread has acquired nothing: what it could acquire, or that there is nothing yet."""
    u, t = first[0], second[0]
    if (
        u.block is t.block
        or u.word
        or t.word
        or first[2]
        or second[2]
        or any(t.known[v.idx] >= v.start for v in u.block.actors)
    ):
        return []
    if not first[5]:
        return ["here the read came first: if it is meant to see the write, it does not wait for it"]
    covering = [(location, h) for location, h in releases(detector) if h[2][u.idx] >= first[1] and h[0] is not t]
    if not covering:
        return ["no release follows the first access so far: the second access's thread does not wait for one"]
    location, head = min(covering, key=lambda c: (c[1][0] is not u, c[1][0].block is not u.block, c[1][3][11]))
    return [
        "nearest release behind the first access: %s, to %s; the second access's thread does not acquire that word"
        % (release_in(head), place_in(location.address, head[0].block))
    ]


def place_in(address, block):
    """The name of a word in the layout's terms."""
    from .hang_report import place_of as word_at

    return word_at(address, block)


def closest(detector, first, second, limit=3):
    """The strong reads that saw a write and did not synchronise with it, as text, the most informative first.

    Only reads that would have ordered the two accesses count: the write comes after the first access, the read before
    the second. If there are none, reads whose write comes after the first access count: the chain has several gaps.
    """
    u, t = first[0], second[0]

    def comes_after(pair):
        w, base = pair[0], pair[3]
        if w[0] is u:
            return w is first or w[1] >= first[1] and w[11] > first[11]
        return base[u.idx] >= first[1]

    def comes_before(pair):
        r = pair[1]
        return r[0] is t or t.known[r[0].idx] >= r[1]

    def score(pair):
        w, r, _, _ = pair
        return (
            (w[0].block is u.block) * 4
            + (r[0].block is t.block) * 4
            + (w[0] is u)
            + (r[0] is t)
            + (w[0].rank == u.rank)
            + (r[0].rank == t.rank),
            "acquire" in r[6] or "release" in w[6],  # one side is right
            r[11],
        )

    pairs = [p for p in detector.not_synchronised() if {p[0][0].rank, p[1][0].rank} <= {u.rank, t.rank}]
    pairs = [p for p in pairs if comes_after(p)]
    pairs = [p for p in pairs if comes_before(p)] or pairs
    pairs.sort(key=score, reverse=True)
    out = dict.fromkeys("%s -> %s: %s" % (place_of(w), place_of(r), why) for w, r, why, _ in pairs)
    return list(out)[:limit]
