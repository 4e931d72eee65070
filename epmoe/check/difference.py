"""One difference between a result and the reference. Its place is named in the specification's terms."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

PLACES = "rank", "expert", "src_rank", "token", "k", "row", "column"
_HEX_DIGITS = {1: 2, 2: 4, 4: 8, 8: 16}


@dataclass(frozen=True)
class Difference:
    """What differs, where, and the sentence of the specification that it breaks. Places that do not apply are None.

    got, want: the whole arrays.
    `rank` has the wrong result, `expert` is a global id ("shared" for the shared expert), `token` and `k` are indices on
    src_rank, `row` and `column` indices of the array `what`; `round` counts from 1.
    """

    what: str
    says: str
    got: object = field(default=None, repr=False, compare=False)
    want: object = field(default=None, repr=False, compare=False)
    rank: int | None = None
    expert: int | str | None = None
    src_rank: int | None = None
    token: int | None = None
    k: int | None = None
    row: int | None = None
    column: int | None = None
    rule: str = ""
    cause: str = ""
    round: int | None = None

    def because(self, cause):
        """The same difference with its likely cause."""
        return replace(self, cause=cause)

    def in_round(self, number):
        """The same difference, in a round that is counted from 0."""
        return replace(self, round=number + 1)

    def record(self):
        """Place, text, rule and likely cause, without the arrays, as a dict of plain data: for JSON, and other ranks."""
        fields = {name: getattr(self, name) for name in ("what", "round", *PLACES, "says", "rule", "cause")}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}

    @property
    def place(self):
        """`rank 1, expert 5, src_rank 0, token 3, k 2, row 17, column 64`, as far as it is known.

        A round is named if it is not the first one. The earlier rounds were right.
        """
        named = {"round": None if self.round == 1 else self.round}
        named |= {name: getattr(self, name) for name in PLACES}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)

    def __str__(self):
        lines = [f"{self.place}: {self.what} {self.says}" if self.place else f"{self.what} {self.says}"]
        if self.rule:
            lines.append(f"    rule: {self.rule}")
        if self.cause:
            lines.append(f"    likely cause: {self.cause}")
        return "\n".join(lines)


def of_all_ranks(differences, gather):
    """The differences of all ranks, without the arrays; collective. gather(value): the value of each process."""
    told = gather([d.record() for d in differences])
    return [Difference(**d) for of_process in told for d in of_process]


def columns(different):
    """The columns in which elements differ, as a phrase: ", all in columns 120 to 127"; "" if they are everywhere."""
    wrong = np.flatnonzero(different.reshape(-1, different.shape[-1]).any(axis=0))
    first, last = int(wrong[0]), int(wrong[-1])
    if first == last:
        return f", all in column {first}"
    span = last - first + 1
    return f", all in columns {first} to {last}" if len(wrong) == span <= different.shape[-1] // 2 else ""


def as_array(value):
    """A result as an array; one of no dimension and type object if it is none, such as a ragged list."""
    try:
        return np.asarray(value)
    except ValueError:
        made = np.empty((), object)
        made[()] = value
        return made


def form(array):
    """The type and shape of `as_array`'s result, in words."""
    if array.dtype.kind == "O":
        held = array[()] if array.ndim == 0 else array
        ragged = isinstance(held, (list, tuple))
        return "a list that is no array (rows of different lengths?)" if ragged else f"{held!r:.60}"
    return f"{array.dtype} {array.shape}"


def bits(array):
    """The same elements as unsigned integers of their width, so that NaN and -0 are compared as bytes."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def shown(value):
    """A number as text, with its bits where they matter: `1.5 [0x3fc0]`, `-1`."""
    value = np.asarray(value).reshape(())
    if value.dtype.kind in "iub":
        return str(value.item())
    width = value.dtype.itemsize
    code = int(value.reshape(1).view(f"u{width}")[0])
    with np.errstate(invalid="ignore"):  # an 8-bit NaN
        number = float(value.astype(np.float64))
    return f"{number:.9g} [0x{code:0{_HEX_DIGITS[width]}x}]"


def shown_fp4(byte, upper):
    """One of the two e2m1 codes of a byte, as `shown` does."""
    code = (int(byte) >> 4) if upper else (int(byte) & 15)
    value = np.array([code], np.uint8).view(ml_dtypes.float4_e2m1fn)[0]
    return f"{float(value):g} [0x{code:x}]"
