"""Starting launches again in one call: whether a stream is captured, the thread's context, the launches themselves.

Each of these is a call of the driver, and through cuda.bindings takes a microsecond or so besides what the driver does.
One function, which Numba compiles for the CPU when the first launches are to be started again (0.1 s), makes them all;
the interpreter is let go meanwhile, since a launch waits while the stream's queue is full.
"""
import ctypes
from functools import cache, partial

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .captures import CAPTURED
from .gpu_driver import check, cu

CUDA_VERSION = 12000    # whose functions are asked for
_WORD, _INT = ctypes.c_size_t, ctypes.c_uint32
_FUNCTIONS = {          # arguments
    "cuStreamIsCapturing": (_WORD, _WORD),
    "cuCtxGetCurrent": (_WORD,),
    "cuCtxSetCurrent": (_WORD,),
    "cuLaunchKernel": (_WORD, *7 * (_INT,), *3 * (_WORD,)),
    "cuLaunchKernelEx": 4 * (_WORD,)}
# Words of a machine, and of launches that start together: of which each has N_WORDS behind LAUNCHES
CONTEXT, N_STREAMS, STREAMS = 0, 1, 2
MACHINE, N_LAUNCHES, LAUNCHES = 0, 1, 2
N_WORDS = 7             # see Launch.words


@intrinsic
def _load(typing, address):
    """The int64 at an address."""
    def code(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        return builder.load(pointer)

    return types.int64(types.int64), code


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
    """That driver's functions in one: (address of the words of launches) -> 0, CAPTURED, or the code of an error.

    With what keeps it.
    """
    is_capturing, get_context, set_context, launch, launch_with = (_function(driver, name) for name in _FUNCTIONS)

    @njit(types.int32(types.int64), nogil=True)
    def start(words):
        machine = _load(words + 8 * MACHINE)
        status, streams = _new_word(), _load(machine + 8 * STREAMS)
        for i in range(_load(machine + 8 * N_STREAMS)):
            # an error as well is for the one to see who asks again
            if is_capturing(_load(streams + 8 * i), status) != 0 or _load(status) != 0:
                return types.int32(CAPTURED)
        current, context = _new_word(), _load(machine + 8 * CONTEXT)
        code = get_context(current)
        if code == 0 and _load(current) != context:
            code = set_context(context)
        at = words + 8 * LAUNCHES
        for _ in range(_load(words + 8 * N_LAUNCHES)):
            if code != 0:
                break
            config, function, arguments = _load(at), _load(at + 8), _load(at + 16)
            if config != 0:
                code = launch_with(config, function, arguments, 0)
            else:
                blocks, threads, shared_bytes, stream = (_load(at + 24), _load(at + 32), _load(at + 40), _load(at + 48))
                code = launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)
            at += 8 * N_WORDS
        return code

    # the compiled code itself: a call through Numba's dispatcher, or through ctypes, takes 0.1 to 0.3 us more
    compiled, = start.overloads.values()
    return start, compiled.entry_point


def _array(words):
    return (ctypes.c_int64 * max(1, len(words)))(*words)


class Restarter:
    """Starts the launches of one machine again, if none of its streams is being captured.

    context: its CUcontext. Streams that cannot be captured need not be told.
    """

    def __init__(self, context):
        self._words, self._streams, self._handles = _array((int(context), 0, 0)), [], []

    def watch(self, stream):
        """This stream may be captured, from now on."""
        self._streams.append(int(stream))
        self._handles.append(_array(self._streams))     # the one before may be read now
        self._words[STREAMS] = ctypes.addressof(self._handles[-1])
        self._words[N_STREAMS] = len(self._streams)

    def again(self, launches):
        """A function that starts these Launches: () -> 0, CAPTURED, or the driver's code of an error."""
        words = _array((ctypes.addressof(self._words), len(launches), *(w for one in launches for w in one.words())))
        start = partial(_compiled(cu)[1], ctypes.addressof(words))
        start.reads = self, launches, words
        return start
