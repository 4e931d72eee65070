"""Random programs of a few threads for the race detector: two ranks, two blocks, two warps, all operations.

Random operations nearly always race at once. So most threads have a role in passing a message (write, tell, relay,
look, read); steps are dropped from it and others added.
"""

from detector_runs import ARRAY, SHARED

FLAGS, DATA = (0, 4, 16), (32, 36, 48)
PLACES = [(rank, block, thread) for rank in (0, 1) for block in (0, 1) for thread in (0, 1, 32)]
SCOPES = ("cta", "gpu", "sys")
STORES = "store_i32", "store_i32", "store16", "store_u8", "store_u64"
LOADS = "load_i32", "load_i32", "load16", "load_u8", "load_u64"
TELL = (
    "st_release",
    "st_relaxed",
    "atomic_add_release",
    "red_add_release",
    "red_add_relaxed",
    "atomic_add_acq_rel",
    "atomic_add_relaxed",
    "st_release",
    "st_relaxed",
)
LOOK = ("ld_acquire", "ld_acquire", "ld_relaxed", "atomic_add_acquire", "atomic_add_relaxed", "atomic_add_acq_rel")
RELAY = (
    "atomic_add_relaxed",
    "atomic_add_acq_rel",
    "red_add_relaxed",
    "atomic_add_acquire",
    "red_add_release",
    "atomic_max_relaxed",
    "atomic_cas_relaxed",
    "atomic_cas_acq_rel",
)
COPY = (
    "shared_store_i32",
    "fence_proxy_async",
    "bulk_store",
    "bulk_commit",
    "bulk_wait",
    "bulk_wait_read",
    "shared_load_i32",
)


class Trace:
    """Draws one: programs ({(launch, rank, block, thread): steps}) and how to launch them."""

    def __init__(self, random):
        self.random = random
        self.scope = random.choice(("sys", "sys", "gpu", "cta"))
        self.care = random.choice((0.6, 0.9, 1.0, 1.0))
        self.width = "i32" if random.random() < 0.9 else "u64"
        self.stray = random.choice((0.0, 0.0, 0.1, 0.3))  # how often a step differs from the role
        self.copies = random.random() < 0.25
        self.flags = FLAGS[: random.choice((1, 1, 2, 3))]
        self.data = DATA[: random.choice((1, 2, 3))]
        self.launches = 2 if random.random() < 0.15 else 1
        self.programs = {}
        within = {"sys": 0, "gpu": 1, "cta": 2}[self.scope] if random.random() < 0.8 else 0
        # mostly where the scope suffices
        places = [p for p in PLACES if p[:within] == (0, 0)[:within]]
        chosen = random.sample(places, min(len(places), random.choice((2, 3, 3, 4))))
        for launch in range(1, self.launches + 1):
            barriers = {p[:2]: random.choice((0, 0, 1, 2)) for p in chosen}
            for number, place in enumerate(chosen):
                self.programs[(launch, *place)] = self.program(number, barriers[place[:2]], place[2] % 32 == 0)
            self.add_syncwarps(launch, chosen, barriers)

    def pick(self, *of):
        return self.random.choice(of)

    def strong(self, ways, flag):
        """A strong operation on a flag."""
        scope = self.scope if self.random.random() > self.stray else self.pick(*SCOPES)
        way = self.pick(*ways)
        width = self.width if self.random.random() > self.stray / 2 else self.pick("i32", "u32", "u64")
        if way.startswith(("atomic_max", "atomic_cas")):  # not every one is a word
            scope, width = "gpu" if scope == "cta" else scope, "i32" if width == "u32" else width
        flag = flag - flag % 8 if width == "u64" else flag
        return "%s_%s_%s" % (way, scope, width), flag, self.pick(1, 1, 2)

    def tell(self, flag):
        """Write a flag; mostly so that it releases."""
        way = self.strong(TELL, flag)
        again = [self.strong(("st_relaxed", "atomic_add_relaxed"), flag)] if self.random.random() < 0.4 else []
        if "relaxed" in way[0] and self.random.random() < self.care:
            return [self.fence(), way, *again]
        return [way, *again]

    def look(self, flag):
        """Read a flag; mostly so that it acquires."""
        way = self.strong(LOOK, flag)
        if "relaxed" in way[0] and self.random.random() < self.care:
            return [way, self.fence()]
        return [way]

    def fence(self):
        return ("fence_acq_rel_" + (self.scope if self.random.random() > self.stray else self.pick(*SCOPES)), 0, 0)

    def weak(self, ways, at):
        word = self.pick(*ways) if self.random.random() < 0.4 else ways[0]
        size = {"16": 16, "u8": 1, "u64": 8}.get(word.replace("load", "").replace("store", "").strip("_"), 4)
        return word, at - at % size, self.pick(1, 2)

    def anything(self):
        """A step outside any role."""
        kind = self.random.random()
        if kind < 0.25:
            return self.weak(STORES + LOADS, self.pick(*self.data))
        if kind < 0.35:
            return self.weak(STORES + LOADS, self.pick(*self.flags))
        if kind < 0.4:
            return "load16_nc", self.pick(*self.data) & ~15, 0
        if kind < 0.45:
            return (self.pick("load16_relaxed_sys", "store16_relaxed_sys"), self.pick(*self.data, *self.flags) & ~15, 1)
        if kind < 0.5:
            word = self.pick("shared_add_i32", "shared_add_i32", "array_load_i32", "array_store_i32")
            return word, ARRAY + self.pick(0, 4), self.pick(0, 1)
        if kind < 0.55:
            return self.strong(TELL + LOOK, self.pick(*self.data))
        if kind < 0.7:
            return self.fence()
        return self.strong(TELL + LOOK + RELAY, self.pick(*self.flags))

    def copy(self):
        """Parts of a bulk store, in order, some of them missing."""
        at = self.pick(*self.data) & ~15
        for word in COPY:
            if self.random.random() > 0.15:
                yield word, at if word == "bulk_store" else SHARED + at, 1

    def program(self, number, barriers, may_copy):
        """The steps of one thread. may_copy: the detector treats a warp's bulk stores as one lane's."""
        parts = []
        for _ in range(self.pick(1, 1, 1, 2)):
            flag, at = self.pick(*self.flags), self.pick(*self.data)
            part = self.pick("write", "relay", "relay", "read") if number > 1 else ("write", "read")[number]
            look, tell = self.look(flag), self.tell(flag)
            touch = self.weak(LOADS + STORES[:1], at)
            guard = [("skip_if_zero", 0, 1 + self.pick(0, 0, 2))] if self.random.random() < self.care else []
            if part != "write" and self.random.random() < 0.8:
                look.insert(0, ("pause", 0, self.pick(20, 200)))
            early = [self.fence()] if self.random.random() < 0.3 else []
            steps = {
                "write": early + [self.weak(STORES, at)] + tell,
                "relay": look[:-1] + [self.strong(RELAY, flag)],
                "read": look + guard + [touch],
            }[part]
            if part == "read" and self.random.random() < 0.3:
                steps += [self.strong(TELL, self.pick(*self.flags))]
            parts += steps
        if self.copies and may_copy and self.random.random() < 0.6:
            place = self.random.randrange(len(parts) + 1)
            parts[place:place] = list(self.copy())
        parts = [s for s in parts if self.random.random() > self.stray / 3]
        for _ in range(4):
            if self.random.random() < self.stray:
                parts.insert(self.random.randrange(len(parts) + 1), self.anything())
        for _ in range(barriers):
            parts.insert(self.random.randrange(len(parts) + 1), ("syncthreads", 0, 0))
        return parts

    def add_syncwarps(self, launch, chosen, barriers):
        """One syncwarp in each lane of a warp, if at all, each between the same barriers of the block."""
        for warp in {(p[0], p[1], p[2] // 32) for p in chosen}:
            if self.random.random() < 0.3:
                behind = self.random.randrange(barriers[warp[:2]] + 1)
                for p in chosen:
                    if (p[0], p[1], p[2] // 32) == warp:
                        steps = self.programs[(launch, *p)]
                        ends = [-1] + [i for i, s in enumerate(steps) if s[0] == "syncthreads"] + [len(steps)]
                        place = self.random.randint(ends[behind] + 1, ends[behind + 1])
                        steps.insert(place, ("syncwarp", 0, 0))
