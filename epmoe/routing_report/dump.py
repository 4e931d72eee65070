"""Reads a routing dump: the expert ids of each token, in one or more steps, from an .npz, an .npy or JSON lines."""

from dataclasses import dataclass, field

import numpy as np

from epmoe.routing import check_ids, opened
from epmoe.routing_report import json_lines
from epmoe.routing_report.json_lines import WANTED, one_number
from epmoe_ref.errors import EPValueError

NO_IDS = "give the numbers of each token's experts, not scores of all experts or a map of them"
WRITES = "writes a file that can be read"
TORCH = f"numpy.save('ids.npy', ids.cpu().numpy()) {WRITES}"


@dataclass
class Dump:
    """The expert ids of a file.

    steps: a list of int64 arrays (tokens, top_k), -1 for no expert. n_experts: the file's, or None.
    rank_offsets: int64 (n_ranks + 1), where each rank's tokens begin (files of one step), or None. hidden: of the
    file's x, or None. notes: changes made on reading.
    """

    steps: list
    n_experts: int | None = None
    rank_offsets: np.ndarray | None = None
    hidden: int | None = None
    notes: list = field(default_factory=list)

    @property
    def top_k(self):
        """Expert ids of a token."""
        return self.steps[0].shape[1]

    @property
    def tokens(self):
        """Tokens of all steps."""
        return sum(len(ids) for ids in self.steps)

    def check(self, n_experts=None):
        """Refuse ids as routing.check_ids does. The error names the place."""
        for step, ids in enumerate(self.steps):
            check_ids(f"step {step}, " if len(self.steps) > 1 else "", ids, n_experts)

    def split(self, ids, n_ranks):
        """The ids of one step by rank, split at rank_offsets, else evenly; the first ranks take the remainder."""
        if self.rank_offsets is not None and len(self.rank_offsets) == n_ranks + 1:
            return np.split(ids, self.rank_offsets[1:-1])
        return np.array_split(ids, n_ranks)


def read(path):
    """The Dump of a file. Errors: EPValueError, naming what the file holds and what is needed."""
    dump = _read(path)
    if not dump.tokens:
        raise EPValueError(f"{path} has 0 tokens: {WANTED}")
    dump.check()
    dump.steps = [ids.astype(np.int64) for ids in dump.steps]
    return dump


def _read(path):
    try:
        with opened(path) as file:
            start = file.read(6)
            if start == b"\x93NUMPY" or start[:2] == b"PK":  # an .npz is a zip file
                file.seek(0)
                found = np.load(file, allow_pickle=False)
                return _of_array(path, found) if isinstance(found, np.ndarray) else _of_npz(path, dict(found.items()))
            file.seek(0)
            text = file.read().decode()
            if str(path).endswith(".csv"):
                loaded = f"numpy.loadtxt({str(path)!r}, int, delimiter=',')"
                raise EPValueError(f"{path} is CSV, which is not read: numpy.save('ids.npy', {loaded}) {WRITES}")
    except EPValueError:
        raise
    except OSError as error:
        raise EPValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged file fails in many ways, in NumPy, zipfile and zlib
        said = " ".join(str(error).split()) or type(error).__name__
        raise EPValueError(f"{path} cannot be read ({said}): {WANTED}") from None
    steps, n_experts, notes = json_lines.read(path, text)
    return Dump(steps, n_experts=n_experts, notes=notes)


def _of_npz(path, arrays):
    if not all(isinstance(a, np.ndarray) for a in arrays.values()):
        made = "made by torch.save" if any(n.endswith("data.pkl") for n in arrays) else "not an .npz"
        raise EPValueError(f"{path} is {made}: {TORCH}")
    integers = [name for name, a in arrays.items() if a.dtype.kind in "iu" and a.ndim in (2, 3)]
    name = "topk_ids" if "topk_ids" in arrays else integers[0] if len(integers) == 1 else None
    if name is None:
        held = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in arrays.items()) or "nothing"
        raise EPValueError(f"{path} has no topk_ids (it has {held}): {WANTED}")
    dump = _of_array(f"{name} in {path}", arrays[name])
    if name != "topk_ids":
        dump.notes.append(f"{name} is read as topk_ids: the only integers of two or three dimensions in the file")
    if "n_experts" in arrays:
        dump.n_experts = one_number(path, "n_experts", arrays["n_experts"])
    if "x" in arrays and arrays["x"].ndim >= 2:
        dump.hidden = arrays["x"].shape[-1]
    if "rank_offsets" in arrays and len(dump.steps) == 1:
        dump.rank_offsets = _checked_offsets(path, arrays["rank_offsets"], len(dump.steps[0]))
    return dump


def _checked_offsets(path, offsets, tokens):
    good = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    good = good and offsets[0] == 0 and offsets[-1] == tokens and (np.diff(offsets.astype(np.int64)) >= 0).all()
    if not good:
        raise EPValueError(
            f"rank_offsets in {path} is {offsets.tolist()}; it must start at 0, never fall and end at {tokens}, the "
            "number of tokens: rank r has the tokens rank_offsets[r]:rank_offsets[r + 1]"
        )
    return offsets.astype(np.int64)


def _of_array(name, ids):
    if ids.dtype.kind not in "iu":
        whole = ids.dtype.kind == "f" and (ids == np.floor(ids)).all()
        remedy = "convert with .astype(np.int32)" if whole else NO_IDS
        raise EPValueError(f"{name} has dtype {ids.dtype}; integers are needed: {remedy}")
    if ids.ndim not in (2, 3) or ids.shape[-1] == 0 or (ids.ndim == 3 and len(ids) == 0):
        raise EPValueError(f"{name} has shape {list(ids.shape)}: {WANTED}")
    return Dump(list(ids) if ids.ndim == 3 else [ids])
