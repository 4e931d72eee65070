"""Casts as integer arithmetic in PTX, for devices without the instructions: bf16 and fp16 pairs, and e4m3.

The results equal newer devices' instructions bit for bit. `run` interprets a PTX text on the host, so it can be tested
without a GPU.
"""

import re

import numpy as np


def _pair(one, shift, *temporaries):
    """PTX that casts $1 into the low part of $0 and $2 into the part above. one: PTX that casts {x} to register {r}."""
    registers = ".reg .b32 r1, r2; " + " ".join(temporaries)
    return "{ %s %s %s shl.b32 r2, r2, %d; or.b32 $0, r1, r2; }" % (
        registers,
        one.format(x="$1", r="r1"),
        one.format(x="$2", r="r2"),
        shift,
    )


# To round to nearest even, add half an ulp of bf16, or one less if the result's last bit would be even. It carries.
BF16X2 = _pair(
    "mov.b32 u, {x}; shr.u32 {r}, u, 16; and.b32 {r}, {r}, 1; add.u32 {r}, {r}, 0x7fff; add.u32 {r}, {r}, u; "
    "shr.u32 {r}, {r}, 16; and.b32 u, u, 0x7fffffff; setp.gt.u32 p, u, 0x7f800000; "
    "selp.b32 {r}, 0x7fff, {r}, p;",
    16,
    ".reg .b32 u; .reg .pred p;",
)

F16X2 = "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }"

# Add to saturated |x| 2**20 times its power of two (at least 2**-6). The hardware's addition then rounds it to a step
# of e4m3, whose number is in the low bits of the sum. A binade has 2**3 steps; the first is 2**-6 = bits 121 << 23.
E4M3X2 = _pair(
    "mov.b32 u, {x}; and.b32 a, u, 0x7fffffff; mov.b32 f, a; min.f32 f, f, 0f43E00000; mov.b32 e, f; "
    "and.b32 e, e, 0x7f800000; max.u32 e, e, 0x3c800000; add.u32 m, e, 0x0a000000; mov.b32 g, m; "
    "add.rn.f32 f, f, g; mov.b32 {r}, f; sub.u32 {r}, {r}, m; sub.u32 e, e, 0x3c800000; shr.u32 e, e, 20; "
    "add.u32 {r}, {r}, e; setp.gt.u32 p, a, 0x7f800000; shr.u32 u, u, 24; and.b32 u, u, 0x80; "
    "or.b32 {r}, {r}, u; selp.b32 {r}, 0x7f, {r}, p;",
    8,
    ".reg .b32 u, a, e, m; .reg .f32 f, g; .reg .pred p;",
)


def from_e4m3(shift):
    """PTX that converts the e4m3 in bits shift .. shift + 7 of $1 to float32: moves its bits, multiplies by 2**120."""
    return (
        "{ .reg .b32 u, s; .reg .f32 f; .reg .pred p; shr.u32 u, $1, %d; and.b32 s, u, 0x80; and.b32 u, u, 0x7f; "
        "setp.eq.u32 p, u, 0x7f; shl.b32 u, u, 20; mov.b32 f, u; mul.rn.f32 f, f, 0f7B800000; mov.b32 u, f; "
        "selp.b32 u, 0x7fc00000, u, p; shl.b32 s, s, 24; or.b32 u, u, s; mov.b32 $0, u; }" % shift
    )


def run(text, *operands):
    """The result of a PTX text for operands $1, $2, arrays of uint32 bits. Knows only the instructions used here."""
    values = {"$%d" % i: np.asarray(v, np.uint32) for i, v in enumerate(operands, 1)}
    f32, u32 = (lambda v: v.view(np.float32)), (lambda v: np.asarray(v).view(np.uint32))
    steps = {
        "mov.b32": lambda a: a,
        "and.b32": np.bitwise_and,
        "or.b32": np.bitwise_or,
        "add.u32": np.add,
        "sub.u32": np.subtract,
        "max.u32": np.maximum,
        "shl.b32": np.left_shift,
        "shr.u32": np.right_shift,
        "setp.gt.u32": np.greater,
        "setp.eq.u32": np.equal,
        "selp.b32": lambda a, b, p: np.where(p, a, b),
        "min.f32": lambda a, b: u32(np.fmin(f32(a), f32(b))),
        "add.rn.f32": lambda a, b: u32(f32(a) + f32(b)),
        "mul.rn.f32": lambda a, b: u32(f32(a) * f32(b)),
    }

    def value(word):
        if word in values:
            return values[word]
        return np.full(
            values["$1"].shape,
            int(word[2:] if word.startswith("0f") else word, 16 if word[:2] == "0f" else 0),
            np.uint32,
        )

    for step in text.strip("{} ").rstrip(";").split(";"):
        name, *words = re.split(r"[\s,]+", step.strip())
        if name != ".reg":
            with np.errstate(all="ignore"):
                values[words[0]] = steps[name](*map(value, words[1:]))
    return values["$0"]
