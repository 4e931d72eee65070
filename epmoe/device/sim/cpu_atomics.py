"""Atomic operations of the CPU on real addresses, for words that several processes map. llvmlite compiles them once.

Inside one process the scheduler makes every operation indivisible. But other processes can write a word in a shared window
at any moment, so its strong operations must be the CPU's atomics. All are sequentially consistent, which is at least as
strong as any order in a kernel. Numba's llvmlite compiles them; Numba itself is not imported.
"""

import ctypes
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

ADDRESS = ir.IntType(64)
ORDER = "seq_cst"
C_TYPES = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}


def _module():
    """load, store and compare-and-swap of 32 and 64 bits; the signature takes the address as an integer."""
    module = ir.Module("cpu_atomics")
    for bits in (32, 64):
        word = ir.IntType(bits)
        for name, result, operands in (("load", word, 0), ("store", ir.VoidType(), 1), ("swap_if", word, 2)):
            function = ir.Function(module, ir.FunctionType(result, [ADDRESS] + [word] * operands), f"{name}{bits}")
            b = ir.IRBuilder(function.append_basic_block())
            at = b.inttoptr(function.args[0], word.as_pointer())
            if name == "load":
                b.ret(b.load_atomic(at, ORDER, bits // 8))
            elif name == "store":
                b.store_atomic(function.args[1], at, ORDER, bits // 8)
                b.ret_void()
            else:
                b.ret(b.extract_value(b.cmpxchg(at, function.args[1], function.args[2], ORDER, ORDER), 0))
    return module


@cache
def _engine():
    try:
        llvm.initialize()
    except RuntimeError:  # newer versions of llvmlite do it themselves, and raise
        pass
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(_module())), machine)
    engine.finalize_object()
    return engine


@cache
def _compiled(kind):
    """(load, store, swap_if) of "i32", "u32" or "u64", as functions of an address."""
    c, bits = C_TYPES[kind], 64 if kind == "u64" else 32
    address = ctypes.c_uint64
    signatures = {"load": (c, address), "store": (None, address, c), "swap_if": (c, address, c, c)}
    return tuple(
        ctypes.PYFUNCTYPE(*types)(_engine().get_function_address(f"{name}{bits}")) for name, types in signatures.items()
    )


class AtomicView:
    """Words of one type, starting at an address, indexed like a memoryview; every access is atomic."""

    __slots__ = ("origin", "item", "load", "store", "swap_if")

    def __init__(self, origin, kind):
        self.origin, self.item = origin, ctypes.sizeof(C_TYPES[kind])
        self.load, self.store, self.swap_if = _compiled(kind)

    def __getitem__(self, k):
        return self.load(self.origin + k * self.item)

    def __setitem__(self, k, v):
        self.store(self.origin + k * self.item, v)

    def update(self, k, change):
        """Replace a word by change(word), indivisibly; (old, new)."""
        at = self.origin + k * self.item
        old = self.load(at)
        while True:
            new = change(old)
            seen = self.swap_if(at, old, new)
            if seen == old:
                return old, new
            old = seen
