"""One run of the simulator: all queued launches, together, until every thread has ended."""

import threading

import greenlet
import numpy as np

from epmoe_ref.errors import EPError

from ..garbage import without_collecting
from .memory import ONE_AT_A_TIME
from .scheduler import NOW
from .threads import Block, end_pool, fill_pool, start_threads
from .warp import leave

SPEEDS = 1.0, 1.0, 0.2, 0.02  # each block gets one of these
SLOW = 50
THREADS_PER_SM, BLOCKS_PER_SM, SHARED_PER_SM, SHARED_PER_BLOCK = 2048, 32, 228 * 1024, 227 * 1024


def resident_blocks(threads, shared_bytes, n_sms):
    """How many blocks of this size n_sms multiprocessors hold at once."""
    warps = (threads + 31) // 32
    per_sm = min(THREADS_PER_SM // (32 * warps), BLOCKS_PER_SM)
    if shared_bytes:
        per_sm = min(per_sm, SHARED_PER_SM // (shared_bytes + 1024))
    return per_sm * n_sms


class Run:
    """Streams of launches, the blocks that run, and the launches that may start next."""

    def __init__(self, machine, streams):
        self.machine = machine
        self.waiting = [list(launches) for launches in streams]  # by stream, in order
        self.blocks = []
        self.room = {}  # rank -> warps that its processors can still hold
        self.active = []  # launches that have blocks to start
        self.over = set()  # ranks that have ended a launch
        self.keep = []  # shared memory of ended blocks, so that addresses stay unique
        self.random = machine.random

    def go(self):
        """Run to the end, or to the first error."""
        with ONE_AT_A_TIME:
            if threading.current_thread() is threading.main_thread():
                self.run_all()
                return
            # greenlets belong to their OS thread, and only the main thread is sure to come here again
            of_main, NOW.pool = NOW.pool, []
            try:
                self.run_all()
            finally:
                end_pool()
                NOW.pool = of_main

    @without_collecting()  # it would scan thousands of frames and find nothing
    def run_all(self):
        m = self.machine
        detector = m.new_detector([q for q in self.waiting if q])
        NOW.begin(
            self.random,
            self,
            detector=detector,
            expire_waits=m.expire_waits,
            start_ns=m.elapsed_ns,
            real_time=m.real_time,
        )
        NOW.copies = m.network.take_late()
        try:
            with np.errstate(all="ignore"):
                # one more each, because a thread that ends starts the next launch before it is idle itself
                fill_pool(
                    sum(
                        1
                        + max(
                            min(launch.grid, m.capacity(launch.threads, launch.shared_bytes)) * launch.threads
                            for launch in queue
                        )
                        for queue in self.waiting
                    )
                )
                for i in range(len(self.waiting)):
                    self.next_launch(i)
                while NOW.live:
                    NOW.pick().switch()
                m.network.outlive(NOW.copies)
        except BaseException as error:
            place = getattr(error, "add_note", None)
            if place and not isinstance(error, (EPError, greenlet.GreenletExit)):
                t = next((t for b in self.blocks for t in b.threads if t.block is b and t.dead), None)
                if t is not None:
                    error.add_note("in %s" % t.name())
            self.stop_all()
            raise
        finally:
            m.elapsed_ns = NOW.nanoseconds() if not m.real_time else 0
            m.steps += NOW.steps
            NOW.detector = detector = None  # with everything it remembers, or the collector would scan it
            NOW.live = 0
            NOW.forget()

    # ------------------------------------------------------------------ starting
    def next_launch(self, i):
        if not self.waiting[i]:
            return
        launch = self.waiting[i].pop(0)
        launch.stream_index = i
        if NOW.detector is not None:
            NOW.detector.launch_begins(launch)
        self.active.append(launch)
        self.start_blocks(launch.rank)

    def start_blocks(self, rank):
        """Start as many blocks as the rank's processors can hold."""
        m = self.machine
        for launch in [a for a in self.active if a.rank == rank]:
            limit = m.capacity(launch.threads, launch.shared_bytes)
            share = 1.0 / limit
            while launch.to_start and self.room.get(rank, 0.0) + share <= 1.0 + 1e-9:
                self.room[rank] = self.room.get(rank, 0.0) + share
                launch.share = share
                self.start_block(launch, launch.to_start.pop(0))
            if not launch.to_start:
                self.active.remove(launch)

    def start_block(self, launch, index):
        speed = self.random.choice(SPEEDS) if self.random else 1
        if launch.rank in self.machine.slow_ranks:
            speed /= SLOW
        block = Block(launch, index, speed)
        self.blocks.append(block)
        start_threads(block)
        if NOW.detector is not None:
            NOW.detector.block_begins(block)

    # ------------------------------------------------------------------ ending
    def ended(self, t):
        block, launch = t.block, t.launch
        if NOW.detector is not None:
            NOW.detector.thread_ends(t.actor)
        leave(t)
        if block.live:
            return
        self.blocks.remove(block)
        self.keep.append(block.spans)
        launch.unfinished -= 1
        self.room[launch.rank] -= launch.share
        self.start_blocks(launch.rank)
        if launch.unfinished == 0:
            self.over.add(launch.rank)
            if NOW.detector is not None:
                NOW.detector.launch_ends(launch)
            self.next_launch(launch.stream_index)

    def stop_all(self):
        """End every thread of a run that failed, including idle ones. A waiting greenlet is never collected."""
        for block in self.blocks:
            for t in block.threads:
                if t.block is block and t and not t.dead:
                    t.throw(greenlet.GreenletExit)
        end_pool()
