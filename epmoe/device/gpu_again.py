"""Starting launches again in one call: whether a stream is captured, the thread's context, the launches themselves.

Whether they still may start is asked first: whether what they name has changed, or somebody refers to what they write.
Each of these is a call of the driver, and through cuda.bindings takes a microsecond or so besides what the driver does.
One function, which Numba compiles for the CPU when the first launches are to be started again (0.1 s), makes them all;
the interpreter is let go meanwhile, since a launch waits while the stream's queue is full.
"""

import ctypes
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .captures import CAPTURED, GONE, HELD
from .gpu_driver import check, cu, outside_capture

CUDA_VERSION = 12000  # whose functions are asked for
_WORD, _INT = ctypes.c_size_t, ctypes.c_uint32
_FUNCTIONS = {  # arguments
    "cuStreamIsCapturing": (_WORD, _WORD),
    "cuCtxGetCurrent": (_WORD,),
    "cuCtxSetCurrent": (_WORD,),
    "cuMemcpyHtoDAsync": 4 * (_WORD,),
    "cuLaunchKernel": (_WORD, *7 * (_INT,), *3 * (_WORD,)),
    "cuLaunchKernelEx": 4 * (_WORD,),
}
# Words of a machine, and of launches that start together: of which each has N_WORDS behind LAUNCHES; and of a copy of
# their parameters before them, if it has any bytes. They were made when the machine had seen so many CHANGES; a SERIAL
# number tells them from others in the same place
CONTEXT, CHANGES, N_STREAMS, STREAMS = range(4)
MACHINE, MADE_AFTER, SERIAL, N_LAUNCHES, COPY_TO, COPY_FROM, COPY_BYTES, COPY_STREAM, LAUNCHES = (
    range(9)
)
N_WORDS = 7  # see Launch.words
# Words of References: their number, and two of each
N_REFERENCES, REFERENCES = 0, 1
# What a word of launches in a Slot is counted from: nothing, the record that it is in, the slot's memory, an address
ITSELF, RECORD, MEMORY, ADDRESSES = range(4)
BLOCK_ALIGNMENT = 256  # bytes
SLOT_BYTES, RECORD_WORDS = 4096, 1024


def _loader(kind):
    @intrinsic
    def load(typing, address):
        def code(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return builder.load(pointer)

        return kind(types.int64), code

    return load


_load, _load_int32 = map(_loader, (types.int64, types.int32))  # what lies at an address


@intrinsic
def _new_word(typing):
    """Address of an int64 on the stack, 0 at first."""

    def code(context, builder, signature, arguments):
        kind = context.get_value_type(types.int64)
        return builder.ptrtoint(cgutils.alloca_once(builder, kind, zfill=True), kind)

    return types.int64(), code


def _function(driver, name):
    flags = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    address, _ = check(driver.cuGetProcAddress(name.encode(), CUDA_VERSION, flags))
    return ctypes.CFUNCTYPE(ctypes.c_int32, *_FUNCTIONS[name])(address)


@cache
def _compiled(driver):
    """That driver's functions in one, with what keeps it.

    (address of the words of launches, serial number that they must have, address of References' words or 0) -> 0, GONE,
    HELD, CAPTURED, or the code of an error. And the same for the address of these three, which is sooner told.
    """
    is_capturing, get_context, set_context, copy, launch, launch_with = (
        _function(driver, name) for name in _FUNCTIONS
    )

    @njit(types.int32(types.int64, types.int64, types.int64), nogil=True)
    def start(words, serial, references):
        machine = _load(words + 8 * MACHINE)
        if _load(words + 8 * SERIAL) != serial or _load(words + 8 * MADE_AFTER) != _load(
            machine + 8 * CHANGES
        ):
            return types.int32(GONE)
        if references != 0:
            at = references + 8 * REFERENCES
            for _ in range(_load(references + 8 * N_REFERENCES)):
                if _load_int32(_load(at)) != _load(at + 8):
                    return types.int32(HELD)
                at += 16
        n_launches = _load(words + 8 * N_LAUNCHES)
        if n_launches == 0:
            return types.int32(0)
        status, streams = _new_word(), _load(machine + 8 * STREAMS)
        for i in range(_load(machine + 8 * N_STREAMS)):
            # an error as well is for the one to see who asks again
            if is_capturing(_load(streams + 8 * i), status) != 0 or _load(status) != 0:
                return types.int32(CAPTURED)
        current, context = _new_word(), _load(machine + 8 * CONTEXT)
        code = get_context(current)
        if code == 0 and _load(current) != context:
            code = set_context(context)
        nbytes = _load(words + 8 * COPY_BYTES)
        if code == 0 and nbytes != 0:
            code = copy(
                _load(words + 8 * COPY_TO),
                _load(words + 8 * COPY_FROM),
                nbytes,
                _load(words + 8 * COPY_STREAM),
            )
        at = words + 8 * LAUNCHES
        for _ in range(n_launches):
            if code != 0:
                break
            config, function, arguments = _load(at), _load(at + 8), _load(at + 16)
            if config != 0:
                code = launch_with(config, function, arguments, 0)
            else:
                blocks, threads, shared_bytes, stream = (
                    _load(at + 24),
                    _load(at + 32),
                    _load(at + 40),
                    _load(at + 48),
                )
                code = launch(
                    function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0
                )
            at += 8 * N_WORDS
        return code

    @njit(types.int32(types.int64), nogil=True)
    def start_bound(three):
        return start(_load(three), _load(three + 8), _load(three + 16))

    # the compiled code itself: a call through Numba's dispatcher, or through ctypes, takes 0.1 to 0.3 us more
    return [
        (one, *(compiled.entry_point for compiled in one.overloads.values()))
        for one in (start, start_bound)
    ]


_Three = 3 * ctypes.c_int64


def _array(words):
    return (ctypes.c_int64 * max(1, len(words)))(*words)


class Restarter:
    """Starts the launches of one machine again, if none of its streams is being captured.

    context: its CUcontext. Streams that cannot be captured need not be told.
    """

    def __init__(self, context):
        self._words, self._streams, self._handles = _array((int(context), 0, 0, 0)), [], []

    def changed(self, n_changes):
        """What launches may name has changed, so often by now: those recorded before do not start any more."""
        self._words[CHANGES] = n_changes

    def n_changes(self):
        """How often it has."""
        return self._words[CHANGES]

    def watch(self, stream):
        """This stream may be captured, from now on."""
        self._streams.append(int(stream))
        self._handles.append(_array(self._streams))  # the one before may be read now
        self._words[STREAMS] = ctypes.addressof(self._handles[-1])
        self._words[N_STREAMS] = len(self._streams)

    def again(self, launches):
        """A function that starts these Launches: (address of References, or 0) -> 0, why it did not, or an error."""
        words = _array(
            (
                ctypes.addressof(self._words),
                self.n_changes(),
                0,
                len(launches),
                0,
                0,
                0,
                0,
                *(w for one in launches for w in one.words()),
            )
        )
        start = self.start_of(ctypes.addressof(words))
        start.reads = self, launches, words
        return start

    def start_of(self, address, serial=0):
        """The function for launches whose words are at an address, as long as they have this serial number."""
        return partial(_compiled(cu)[0][1], address, serial)

    def bound(self, start, references):
        """A function that gives what start(references) does, in less time."""
        three = _Three(*start.args, references)
        again = partial(_compiled(cu)[1][1], ctypes.addressof(three))
        again.reads = start, three
        return again

    def flat(self, launches, blocks):
        """Flat of Launches on one stream; blocks: the parameter block of each, words. None if a Slot cannot hold it."""
        if len({one.stream for one in launches}) != 1:
            return None
        words = [ctypes.addressof(self._words), self.n_changes(), 0, len(launches), *4 * [0]]
        counted_from = LAUNCHES * [ITSELF]
        pointers_at = LAUNCHES + N_WORDS * len(launches)
        for one in launches:
            words += one.words()
            words[-N_WORDS + 2] = 8 * pointers_at
            counted_from += 2 * [ITSELF] + [RECORD] + 4 * [ITSELF]
            pointers_at += 2 * len(one.values)
        offset = 0
        for one, block in zip(launches, blocks):
            n, values_at = len(one.values), len(words) + len(one.values)
            words += [8 * (values_at + i) for i in range(n)] + [offset, *one.values[1:]]
            counted_from += n * [RECORD] + [MEMORY] + (n - 1) * [ITSELF]
            offset += -(-8 * len(block) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        if offset > SLOT_BYTES or len(words) + offset // 8 > RECORD_WORDS:
            return None
        words[COPY_TO:LAUNCHES] = 0, 8 * len(words), offset, launches[0].stream
        counted_from[COPY_TO:LAUNCHES] = MEMORY, RECORD, ITSELF, ITSELF
        for block in blocks:
            words += [int(word) for word in block.view(np.int64)] + (
                -len(block) % (BLOCK_ALIGNMENT // 8)
            ) * [0]
        counted_from += (len(words) - len(counted_from)) * [ITSELF]
        return Flat(np.array(words, np.int64), np.array(counted_from, np.int64), launches)


class Flat(NamedTuple):
    """Launches and all that they read as words: int64, what each is counted from, and what must live as long."""

    words: np.ndarray
    counted_from: np.ndarray
    reads: list

    ADDRESSES = ADDRESSES  # a word that is counted from the i-th address: ADDRESSES + i


class Slot:
    """Memory for the parameters of launches, and the words that start them. owner: who knows of what it holds."""

    __slots__ = (
        "start",
        "owner",
        "reads",
        "_restarter",
        "_activate",
        "_record",
        "_bases",
        "_serial",
    )

    def __init__(self, restarter, activate, record, bases):
        self.start, self.owner, self.reads, self._serial = None, None, None, 0
        self._restarter, self._activate, self._record, self._bases = (
            restarter,
            activate,
            record,
            bases,
        )

    def fill(self, flat, addresses):
        """Hold these launches, start() starts them; words that count from ADDRESSES + i have the i-th address added."""
        self.reads, self._serial = flat.reads, self._serial + 1
        self.start = self._restarter.start_of(self._bases[RECORD], self._serial)
        self.start.reads = self._record
        bases = np.array([*self._bases, *addresses], np.int64)
        self._record[: len(flat.words)] = flat.words + bases[flat.counted_from]
        self._record[SERIAL] = (
            self._serial
        )  # and MADE_AFTER stays that of the launches they are made of

    def begin(self):
        """Copy the parameters on the launches' stream and start them: as start() says, which is for later."""
        self._activate()
        try:
            with outside_capture():  # of another thread's stream, which may forbid copies meanwhile
                return self.start(0)
        finally:
            self._record[COPY_BYTES] = 0


class Slots:
    """Slots that calls on one stream take in turn.

    Whatever read the memory of the one that is taken comes earlier on the stream than what is copied there next.
    """

    def __init__(self, machine, restarter, n, flat):
        self._stream, self._memory = (
            int(flat.words[COPY_STREAM]),
            machine.alloc(n * SLOT_BYTES, "parameters"),
        )
        self._records, self._next = np.zeros((n, RECORD_WORDS), np.int64), 0
        base = self._records.ctypes.data
        self._slots = [
            Slot(
                restarter,
                machine.activate,
                self._records[i],
                (0, base + 8 * RECORD_WORDS * i, self._memory.address + SLOT_BYTES * i),
            )
            for i in range(n)
        ]

    def serve(self, flat):
        """Whether launches are on their stream."""
        return int(flat.words[COPY_STREAM]) == self._stream

    def take(self):
        """The Slot that was taken longest ago."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def free(self):
        """Give the memory back, when the launches have ended."""
        self._memory.free()
