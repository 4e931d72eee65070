"""Makes a Numba intrinsic from a line of PTX. All inline assembly is built here.

The assembly of memory operations is marked as having side effects and touching memory, so the compiler neither
hoists, merges nor reorders it. Operations of several threads are marked convergent, so they are not copied into
branches.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import _Intrinsic, intrinsic

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
_IR = {i32: (ir.IntType(32), "r"), u32: (ir.IntType(32), "r"), u64: (ir.IntType(64), "l"), f32: (ir.FloatType(), "f")}


def ptx(name, text, ret, args, *, effect="memory", convergent=False, below=None, python=None):
    """An intrinsic `name(*args) -> ret` whose body is the PTX `text` ($0, $1, ...: results, then arguments).

    ret: None, a type, or a list of equal types (returned as a tuple).
    effect: "memory": reads and writes, is never moved; "volatile": touches no memory, but is never dropped;
    "reads": may be dropped, but is not moved over writes; "none": depends only on its arguments, calls may be merged.
    below: ((major, minor), text for devices below that compute capability).
    python: function for calls from plain Python code (arithmetic intrinsics work on the host too).
    """
    memory, volatile = effect == "memory", effect in ("memory", "volatile")
    attributes = [
        "nounwind",
        *["convergent"] * convergent,
        *{"reads": ["readonly"], "none": ["readnone"]}.get(effect, []),
    ]
    rets = [] if ret is None else ret if isinstance(ret, list) else [ret]
    return_type = types.void if ret is None else types.UniTuple(rets[0], len(rets)) if isinstance(ret, list) else ret
    constraints = ["=" + _IR[r][1] for r in rets] + [_IR[a][1] for a in args] + (["~{memory}"] if memory else [])
    if isinstance(ret, list):
        result = ir.LiteralStructType([_IR[r][0] for r in rets])
    else:
        result = ir.VoidType() if ret is None else _IR[ret][0]
    function_type = ir.FunctionType(result, [_IR[a][0] for a in args])

    def one(builder, text, values):
        asm = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=volatile)
        return builder.call(asm, list(values), attrs=attributes)

    def codegen(context, builder, signature, values):
        if below is None:
            value = one(builder, text, values)
        else:
            value = _by_capability(
                builder, below[0], lambda: one(builder, text, values), lambda: one(builder, below[1], values)
            )
        if ret is None:
            return context.get_dummy_value()
        if isinstance(ret, list):
            return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(rets))])
        return value

    return typed_intrinsic(name, lambda *given: return_type(*args), codegen, len(args), python=python)


def _by_capability(builder, capability, newer, older):
    """newer()'s code from a compute capability on, and older()'s below it. The compiler keeps one of them.

    The choice is made when PTX is generated, because one device function may be compiled for several devices.
    """
    reflect = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.IntType(32), [ir.IntType(8).as_pointer()]), "__nvvm_reflect"
    )
    question = cgutils.global_constant(builder.module, "cuda_arch", cgutils.make_bytearray(b"__CUDA_ARCH\0"))
    arch = builder.call(reflect, [builder.bitcast(question, ir.IntType(8).as_pointer())])
    is_newer = builder.icmp_signed(">=", arch, ir.Constant(ir.IntType(32), 100 * capability[0] + 10 * capability[1]))
    values = []
    with builder.if_else(is_newer) as branches:
        for branch, emit in zip(branches, (newer, older)):
            with branch:
                values.append((emit(), builder.block))
    if isinstance(values[0][0].type, ir.VoidType):
        return None
    joined = builder.phi(values[0][0].type)
    for value, block in values:
        joined.add_incoming(value, block)
    return joined


def typed_intrinsic(name, signature_of, codegen, n_args, *, python=None, doc=None):
    """An intrinsic of n_args arguments. signature_of(*argument types) gives its signature, or None to refuse them."""

    def define(typing_context, *given):
        signature = signature_of(*given)
        return None if signature is None else (signature, codegen)

    parameters = "".join(", a%d" % i for i in range(n_args))
    namespace = {"define": define}
    exec("def %s(typing_context%s):\n    return define(typing_context%s)\n" % (name, parameters, parameters), namespace)
    made = namespace[name]
    made.__module__, made.__doc__ = __name__, doc
    return intrinsic(made) if python is None else _callable_intrinsic(made, python)


class _NumberIntrinsic(_Intrinsic):
    """An intrinsic that plain Python can also call."""

    def __call__(self, *args):
        return self.python(*args)


def _callable_intrinsic(made, python):
    callable_ = _NumberIntrinsic(made.__name__, made, target="cuda")
    callable_.python = python
    callable_._register()
    return callable_


def cast(name, target, *, python=None):
    """name(x): a number of any type, converted to `target`."""

    def signature_of(x):
        x = types.unliteral(x)
        return target(x) if isinstance(x, (types.Number, types.Boolean)) else None

    def codegen(context, builder, signature, values):
        return context.cast(builder, values[0], signature.args[0], target)

    return typed_intrinsic(name, signature_of, codegen, 1, python=python)


def on_array(name, text, ret, args=()):
    """An intrinsic `name(array, *args)` on a shared array. The array's generic address is the first input of `text`.

    With args, args[0] is an index, and the address of that element is used instead.
    """
    indexed = bool(args)
    operands = [u64, *args[1:]]
    constraints = ["=" + _IR[ret][1]] + [_IR[a][1] for a in operands] + ["~{memory}"]
    function_type = ir.FunctionType(_IR[ret][0], [_IR[a][0] for a in operands])

    def signature_of(array, *rest):
        return ret(array, *args) if isinstance(array, types.Array) else None

    def codegen(context, builder, signature, values):
        array = context.make_array(signature.args[0])(context, builder, value=values[0])
        pointer = builder.gep(array.data, [values[1]]) if indexed else array.data
        address = builder.ptrtoint(pointer, ir.IntType(64))
        asm = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=True)
        return builder.call(asm, [address, *values[2:]])

    return typed_intrinsic(name, signature_of, codegen, 1 + len(args))


def _data_address(context, builder, signature, values):
    array = context.make_array(signature.args[0])(context, builder, value=values[0])
    return builder.ptrtoint(array.data, ir.IntType(64))


address_of = typed_intrinsic(
    "address_of",
    lambda array: u64(array) if isinstance(array, types.Array) else None,
    _data_address,
    1,
    doc="Address (u64) of the first element of an array argument.",
)


def shuffle(name, text):
    """name(v, lane) for i32, u32 and f32 values. The bits go through `text`.

    int64, the type that Numba gives to a sum of int32, is treated as i32.
    """
    function_type = ir.FunctionType(ir.IntType(32), [ir.IntType(32), ir.IntType(32)])

    def signature_of(v, lane):
        v = types.unliteral(v)
        v = i32 if v in (types.int64, types.intp, types.boolean, types.int16, types.int8) else v
        return v(v, i32) if v in (i32, u32, f32) else None

    def codegen(context, builder, signature, values):
        bits, lane = values
        if signature.return_type is f32:
            bits = builder.bitcast(bits, ir.IntType(32))
        asm = ir.InlineAsm(function_type, text, "=r,r,r", side_effect=True)
        out = builder.call(asm, [bits, lane], attrs=("convergent",))
        return builder.bitcast(out, ir.FloatType()) if signature.return_type is f32 else out

    return typed_intrinsic(name, signature_of, codegen, 2)
