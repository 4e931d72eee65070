"""Chooses the next thread: one scheduler for every thread of every block of every virtual rank.

A thread is a greenlet. It runs until it waits (barrier, warp operation, a word that others must write) or until its
quantum of operations is used up. Then it picks its successor and switches to it directly. All choices come from one
random.Random and never from time or addresses, so a seed replays exactly.

Spins. A thread that loads the same value of a word twice, with only strong loads and clock reads in between, can continue
only when another thread writes one of these words. It is parked until then. So waiting is cheap, and a hang is proved
when no thread is ready, and no parked thread continues when it polls again. Loops with other operations never park;
livelock.py ends them.
"""

from collections import deque
from math import log

import greenlet

from epmoe_ref.errors import DeadlockError

from . import livelock

STEP_NS = 100  # simulated nanoseconds per operation
LOOKS_BEFORE_HANG = 64  # how often parked threads may poll again before a hang is declared
FIFO_QUANTUM = 256


class Scheduler:
    """The state of the current run. There is one object for the process, `NOW`, which every operation reads.

    Runs in several OS threads take turns (memory.ONE_AT_A_TIME).
    """

    __slots__ = (
        "fuel mark quantum spent extra_ns log_stay random draw real_time "  # time and chance
        "ready active current burst burst_length boost live hub pool run "  # the running threads
        "watchers spinners looks quiet_since stirred next_look watch expire_waits copies "  # waiting threads and copies
        "detector"
    ).split()

    def __init__(self):
        self.hub = None
        self.live = 0
        self.fuel = self.mark = self.quantum = self.spent = self.extra_ns = 0
        self.detector = None
        self.pool = []
        self.real_time = None
        self.watchers = {}
        self.copies = []

    def begin(self, rng, run, *, detector, expire_waits, start_ns=0, real_time=None):
        """Start a run. rng: random.Random, or None for round-robin. run.ended(thread) is called when a thread ends."""
        self.hub = greenlet.getcurrent()
        self.random = rng
        # of the probability that an operation does not end its thread's quantum
        self.log_stay = log(1.0 - rng.choice((0.0, 0.02, 0.1, 0.3))) if rng else 0.0
        self.draw = rng.random if rng else None
        self.burst_length = rng.choice((1, 16, 128)) if rng else 0
        self.burst, self.current, self.boost = 0, None, 1.0
        self.ready = deque()  # all ready threads, in round-robin order
        # blocks that may have ready threads, in random order
        self.active = [] if rng else deque(maxlen=0)
        self.live = 0
        self.watchers = {}  # 16-byte granule -> threads parked until it is written
        self.spinners = {}  # parked threads, in the order they parked
        self.copies = []  # bulk copies that are issued and not done
        self.looks = 0
        self.detector = detector
        self.expire_waits = expire_waits
        self.run = run
        self.real_time = real_time
        self.fuel = self.quantum  # nothing of the last run's quantum counts
        self.spent = self.quiet_since = 0
        self.stirred = 0  # when a thread last ended, or a word changed that a thread is parked on
        self.watch, self.next_look = None, livelock.QUIET
        self.extra_ns = start_ns
        self.refuel()

    def forget(self):
        """At the end of a run, drop its threads."""
        self.hub = self.run = self.current = self.watch = None
        self.watchers, self.spinners, self.copies = {}, {}, []
        self.ready, self.active = deque(), []

    # ------------------------------------------------------------------ time
    def refuel(self):
        self.spent += self.quantum - self.fuel
        if self.log_stay:
            self.quantum = 1 + int(log(1.0 - self.draw()) / self.log_stay)
        else:
            self.quantum = FIFO_QUANTUM
        self.fuel = self.mark = self.quantum

    @property
    def steps(self):
        """Operations done in this run."""
        return self.spent + self.quantum - self.fuel

    def nanoseconds(self):
        if self.real_time:
            return self.real_time()
        return self.steps * STEP_NS + self.extra_ns

    # ------------------------------------------------------------------ switching
    def new_ready_list(self):
        """The list in which a block keeps its ready threads. In round-robin order all blocks share one."""
        return self.ready if self.random is None else []

    def wake(self, block, threads):
        """Mark these threads of a block as ready to run."""
        if not block.active:
            block.active = True
            self.active.append(block)
            if block.speed * self.boost > 1:
                self.boost = 1 / block.speed
        block.ready.extend(threads)

    def preempt(self):
        """The quantum is used up: switch to another thread."""
        t = greenlet.getcurrent()
        t.operations += self.mark - self.fuel
        self.refuel()
        if self.spent > self.next_look:
            livelock.look(self)
        self.burst = 0
        self.wake(t.block, (t,))
        self.park(t)

    def park(self, t):
        """Park the current thread t, whose wakers are registered. Returns when it runs again."""
        t.operations += self.mark - self.fuel
        nxt = self.pick()
        if nxt is not t:
            nxt.switch()
        self.mark = self.fuel

    def pick(self):
        """Take the next thread from the ready ones."""
        if self.random is None:
            while not self.ready:
                self.idle()
            return self.ready.popleft()
        if self.burst > 0 and self.current.ready:
            self.burst -= 1
            ready = self.current.ready
        else:
            ready = self.choose_block().ready
        if len(ready) > 1:
            i = int(self.draw() * len(ready))
            ready[i], ready[-1] = ready[-1], ready[i]
        return ready.pop()

    def choose_block(self):
        """The block that runs for the next few turns: chosen at random, slow ones less often."""
        active, draw = self.active, self.draw
        if self.copies and draw() < 0.3:
            self.do_copy()
        tries = 0
        while True:
            while not active:
                self.idle()
            i = int(draw() * len(active))
            block = active[i]
            if not block.ready:
                block.active = False
                active[i] = active[-1]
                active.pop()
            elif block.speed * self.boost < 1 and draw() > block.speed * self.boost:
                tries += 1
                if tries == 8:  # if only slow blocks are left, they count as fast
                    self.boost = 1 / max([b.speed for b in active if b.ready])
            else:
                self.current = block
                self.burst = int(draw() * self.burst_length)
                return block

    def do_copy(self):
        copies = self.copies
        copies.pop(int(self.random.random() * len(copies)) if self.random else 0).perform()

    # ------------------------------------------------------------------ waiting for a word
    def poll(self, t, look, value, newest):
        """Thread t has looked at a word and seen a value. If it sees an unchanged newest value again, it spins.

        look: the word's address, its lowest bit set if the load acquires. Other operations in between begin anew.
        """
        time, polled = t.operations + self.mark - self.fuel, t.polled
        if polled and time - t.poll_time > 1:
            polled.clear()
        t.poll_time = time
        if polled.get(look) == value == newest:
            self.spin(t)
            t.poll_time = t.operations
        else:
            polled[look] = value

    def spin(self, t):
        """Park t until one of the words in t.polled is written."""
        watchers = self.watchers
        if t.parked_on.isdisjoint(t.polled):  # it moved on since it last parked: no hang yet
            self.looks = 0
        t.parked_on = frozenset(t.polled)
        for address in t.polled:
            watchers.setdefault(address >> 4, []).append(t)
        self.spinners[t] = None
        self.park(t)

    def copied(self, target, nbytes):
        """Whole vectors were copied to `target`."""
        for granule in [g for g in self.watchers if target >> 4 <= g < target + nbytes >> 4]:
            self.written(granule)

    def written(self, granule, changed=True):
        """A thread wrote a granule on which threads are parked. `changed`: the value is another one."""
        self.looks = 0
        self.quiet_since = self.steps
        if changed:
            self.stirred = self.quiet_since
        for t in list(self.watchers[granule]):
            self.unpark(t)

    def unpark(self, t):
        if t not in self.spinners:
            return
        del self.spinners[t]
        for address in t.polled:
            waiting = self.watchers.get(address >> 4)
            if waiting and t in waiting:
                waiting.remove(t)
                if not waiting:
                    del self.watchers[address >> 4]
        t.polled.clear()
        self.wake(t.block, (t,))

    def idle(self):
        """No thread is ready. Finish a copy, or let the spinning threads poll again, or report a hang."""
        if self.copies:
            self.do_copy()
            return
        self.looks += 1
        if not self.spinners or self.looks > LOOKS_BEFORE_HANG and not self.real_time:
            if self.spinners and self.let_time_pass():
                self.looks = 0
            else:
                self.hang("every thread waits or has ended, and nothing can change that")
        if self.real_time:  # another process may write these words: no proof, only timeouts
            self.quiet_since = self.steps
            self.real_time.let_others_run()
        for t in list(self.spinners):
            self.unpark(t)

    def let_time_pass(self):
        """If waits may expire, let time pass until they do. Returns whether it did."""
        if not self.expire_waits or self.extra_ns >= 10**15:
            return False
        self.extra_ns = max(10**6, self.extra_ns * 4)
        return True

    def hang(self, why):
        from .hang_report import text

        raise DeadlockError(text(why, self))


NOW = Scheduler()
