"""An intrinsic that reads a uint64 from a tuple or from memory, whichever its argument is."""

from llvmlite import ir

from .ptx_factory import typed_intrinsic, types, u64


def output(i):
    """Intrinsic (out) -> uint64: entry i of a tuple of uint64, or of the words at the address `out`."""
    load = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])

    def signature_of(out):
        if isinstance(out, types.UniTuple) and out.dtype == u64 and i < out.count:
            return u64(out)
        return u64(u64) if isinstance(out, types.Integer) else None

    def codegen(context, builder, signature, values):
        if isinstance(signature.args[0], types.UniTuple):
            return builder.extract_value(values[0], i)
        asm = ir.InlineAsm(load, "ld.global.u64 $0, [$1];", "=l,l,~{memory}", side_effect=True)
        return builder.call(asm, [builder.add(values[0], ir.Constant(ir.IntType(64), 8 * i))], attrs=("nounwind",))

    return typed_intrinsic("output_%d" % i, signature_of, codegen, 1)
