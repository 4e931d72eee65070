"""What a verification sends: tokens, their experts and router weights, made from a seed or read from a file.

A file is an .npz with x (N, hidden), topk_ids (N, top_k), topk_weights (N, top_k) of a whole batch, and optionally
rank_offsets (n_ranks + 1) where each rank's tokens begin, and n_experts.
"""

from dataclasses import dataclass
from zipfile import is_zipfile

import ml_dtypes
import numpy as np
from epmoe_ref.errors import EPValueError


@dataclass(frozen=True)
class Routed:
    """Inputs of one round, lists over ranks: x bf16 (n, hidden), topk_ids and topk_weights f32 (n, top_k)."""

    x: list
    topk_ids: list
    topk_weights: list

    @property
    def num_tokens(self):
        """Tokens of each rank."""
        return [len(x) for x in self.x]


def token_counts(n_ranks, max_tokens, rng):
    """An uneven number of tokens for each rank: one rank full, one empty (from 2 ranks on), the others between."""
    counts = rng.integers(1, max_tokens + 1, n_ranks)
    full = rng.integers(n_ranks)
    counts[full] = max_tokens
    if n_ranks > 1:
        counts[(full + 1 + rng.integers(n_ranks - 1)) % n_ranks] = 0
    return [int(n) for n in counts]


def make(cfg, seed, empty_slots=0.1):
    """A batch from a seed: uneven ranks, experts of unequal popularity, a share of the slots -1, softmax weights.

    Under cfg.skip_a2a all ranks hold the same tokens, as the caller of such a configuration promises.
    """
    rng = np.random.default_rng(seed)
    if cfg.skip_a2a:
        one = _rank(cfg, rng, cfg.max_tokens_per_rank, empty_slots)
        ranks = [one] * cfg.n_ranks
    else:
        ranks = [_rank(cfg, rng, n, empty_slots) for n in token_counts(cfg.n_ranks, cfg.max_tokens_per_rank, rng)]
    return Routed(*(list(of_ranks) for of_ranks in zip(*ranks)))


def _rank(cfg, rng, n, empty_slots):
    x = rng.standard_normal((n, cfg.hidden), np.float32).astype(ml_dtypes.bfloat16)
    popularity = np.log(np.arange(1, cfg.n_experts + 1) ** -0.5)  # expert 0 is the hot one
    logits = popularity + rng.gumbel(size=(n, cfg.n_experts))     # the top k of these: distinct, by popularity
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :cfg.top_k].astype(np.int32)
    chosen = np.exp(np.take_along_axis(logits, ids, axis=1))
    weights = (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)
    ids[rng.random(ids.shape) < empty_slots] = -1
    return x, ids, weights


def dump(path, routed, n_experts):
    """Write a batch as an .npz that `load` reads: x as bf16 bits, the ranks' tokens one after another."""
    np.savez(path, x=np.concatenate(routed.x).view(np.uint16), topk_ids=np.concatenate(routed.topk_ids),
             topk_weights=np.concatenate(routed.topk_weights),
             rank_offsets=np.cumsum([0, *routed.num_tokens]), n_experts=n_experts)


@dataclass(frozen=True)
class Batch:
    """A file's content before it is split over ranks; notes say what was converted on the way."""

    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    rank_offsets: np.ndarray | None
    n_experts: int | None
    notes: list

    def experts_for(self, n_ranks):
        """n_experts of the file, or else the least number that holds all ids and is a multiple of n_ranks."""
        if self.n_experts is not None:
            return self.n_experts
        top = max(int(self.topk_ids.max(initial=0)) + 1, self.topk_ids.shape[1])
        return -(-top // n_ranks) * n_ranks

    def check_ids(self, n_experts):
        """Every id must be an expert or -1, and the ids of a row distinct; the message names the file's row."""
        outside = (self.topk_ids < -1) | (self.topk_ids >= n_experts)
        if outside.any():
            row, slot = np.argwhere(outside)[0]
            of_file = self.n_experts == n_experts
            source = "n_experts of the file" if of_file else "from --experts or the largest id"
            raise EPValueError(f"topk_ids in the file: row {row}, slot {slot} holds {self.topk_ids[row, slot]}, "
                               f"outside [0, n_experts={n_experts}) ({source}); -1 means no expert; "
                               f"{int(outside.sum())} such ids")
        ordered = np.sort(self.topk_ids, axis=1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
        if twice.any():
            row = int(np.argmax(twice))
            raise EPValueError(f"topk_ids in the file: row {row} holds {self.topk_ids[row].tolist()}; the ids of a "
                               f"token must be distinct ({int(twice.sum())} such rows): put -1 into a repeated slot")

    def split(self, n_ranks):
        """Routed for n_ranks: by the file's rank_offsets, else evenly (the first ranks take the remainder)."""
        n = len(self.x)
        ends = self.rank_offsets
        if ends is None:
            ends = np.cumsum([0] + [n // n_ranks + (r < n % n_ranks) for r in range(n_ranks)])
        elif len(ends) != n_ranks + 1:
            raise EPValueError(f"rank_offsets in the file is for {len(ends) - 1} ranks, asked for is --ranks "
                               f"{n_ranks}: give --ranks {len(ends) - 1}, or leave rank_offsets out (an even split)")
        parts = [slice(int(a), int(b)) for a, b in zip(ends[:-1], ends[1:])]
        return Routed(*([a[p] for p in parts] for a in (self.x, self.topk_ids, self.topk_weights)))


def _arrays(path):
    """{name: array} of an .npz."""
    try:
        with open(path, "rb") as file:
            if is_zipfile(file):
                return dict(np.load(file, allow_pickle=False).items())
    except OSError as error:
        raise EPValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:     # objects that are no arrays of numbers
        raise EPValueError(f"{path} cannot be read as an .npz file of numbers: {error}") from None
    raise EPValueError(f"{path} cannot be read as an .npz file: np.savez(\"FILE.npz\", x=x, topk_ids=ids, "
                       "topk_weights=weights) writes one")


def load(path):
    """Read an .npz of a user's own routing. What does not fit is refused with what is there and what is needed."""
    arrays = _arrays(path)
    missing = [name for name in ("x", "topk_ids", "topk_weights") if name not in arrays]
    if missing:
        raise EPValueError(f"{path} has no {' and no '.join(missing)} (it has {', '.join(arrays) or 'nothing'}); "
                           "needed are x (N, hidden), topk_ids (N, K), topk_weights (N, K)")
    notes = []
    x, ids, weights = _as_bf16(arrays["x"], notes), arrays["topk_ids"], arrays["topk_weights"]
    if ids.dtype.kind not in "iu":
        raise EPValueError(f"topk_ids in the file has dtype {ids.dtype}; integers are needed")
    if weights.dtype.kind == "V" and weights.dtype.itemsize == 2:
        weights = weights.view(ml_dtypes.bfloat16)
    if weights.dtype != np.float32:
        notes.append(f"topk_weights: {weights.dtype} converted to float32")
    weights = weights.astype(np.float32)
    for name, a in (("x", x), ("topk_ids", ids), ("topk_weights", weights)):
        if a.ndim != 2 or len(a) != len(x):
            raise EPValueError(f"{name} in the file has shape {a.shape}; x is (N, hidden), topk_ids and topk_weights "
                               f"are (N, K) with the same N (x has {x.shape})")
    if weights.shape != ids.shape:
        raise EPValueError(f"topk_weights in the file has shape {weights.shape}, topk_ids {ids.shape} (must be equal)")
    offsets = arrays.get("rank_offsets")
    if offsets is not None:
        offsets = offsets.astype(np.int64)
        ends = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(x)
        if not ends or (np.diff(offsets) < 0).any():
            raise EPValueError(f"rank_offsets in the file is {offsets.tolist()}; it must start at 0, never fall and "
                               f"end at N={len(x)}: rank r has the tokens rank_offsets[r]:rank_offsets[r + 1]")
    n_experts = int(arrays["n_experts"]) if "n_experts" in arrays else None
    return Batch(x, ids, weights, offsets, n_experts, notes)


def _as_bf16(x, notes):
    """bf16 from bits (uint16, or the two void bytes np.save makes of bf16), or rounded from another float type."""
    if x.dtype == np.uint16 or (x.dtype.kind == "V" and x.dtype.itemsize == 2):
        return x.view(ml_dtypes.bfloat16)
    if x.dtype.kind != "f":
        raise EPValueError(f"x in the file has dtype {x.dtype}; floats are needed, or bf16 as uint16 bits")
    notes.append(f"x: {x.dtype} rounded to bfloat16")
    return x.astype(ml_dtypes.bfloat16)
