"""The inputs of a verification: tokens, their experts and router weights, made from a seed or read from a file.

A file is an .npz with topk_ids (N, top_k) of a whole batch, and optionally x (N, hidden), topk_weights (N, top_k),
rank_offsets (n_ranks + 1) where each rank's tokens begin, and n_experts.
"""

import os
from dataclasses import dataclass
from zipfile import is_zipfile

import ml_dtypes
import numpy as np

from epmoe_ref.config import MAX_EXPERTS
from epmoe_ref.errors import EPValueError

MEMBERS = ("x", "topk_ids", "topk_weights", "rank_offsets", "n_experts")
MADE_UP_HIDDEN = 256  # elements of a token if the file has none; fits every format


@dataclass(frozen=True)
class Routed:
    """Inputs of one round, lists over ranks: x bf16 (n, hidden), topk_ids and topk_weights f32 (n, top_k)."""

    x: list
    topk_ids: list
    topk_weights: list

    @property
    def num_tokens(self):
        """Number of tokens of each rank."""
        return [len(x) for x in self.x]


def token_counts(n_ranks, max_tokens, rng):
    """An uneven number of tokens for each rank: one rank full, one empty (from 2 ranks on), the others in between."""
    counts = rng.integers(1, max_tokens + 1, n_ranks)
    full = rng.integers(n_ranks)
    counts[full] = max_tokens
    if n_ranks > 1:
        counts[(full + 1 + rng.integers(n_ranks - 1)) % n_ranks] = 0
    return [int(n) for n in counts]


def make(cfg, seed, no_expert=0.1):
    """A batch from a seed: uneven ranks, experts of unequal popularity, some ids -1, softmax weights.

    Under cfg.skip_a2a all ranks hold the same tokens, as that option requires.
    """
    rng = np.random.default_rng(seed)
    if cfg.skip_a2a:
        one = _rank(cfg, rng, cfg.max_tokens_per_rank, no_expert)
        ranks = [one] * cfg.n_ranks
    else:
        ranks = [_rank(cfg, rng, n, no_expert) for n in token_counts(cfg.n_ranks, cfg.max_tokens_per_rank, rng)]
    return Routed(*(list(of_ranks) for of_ranks in zip(*ranks)))


def _rank(cfg, rng, n, no_expert):
    x = rng.standard_normal((n, cfg.hidden), np.float32).astype(ml_dtypes.bfloat16)
    popularity = np.log(np.arange(1, cfg.n_experts + 1) ** -0.5)  # expert 0 is the hot one
    # the top k of these: distinct, by popularity
    logits = popularity + rng.gumbel(size=(n, cfg.n_experts))
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : cfg.top_k].astype(np.int32)
    chosen = np.exp(np.take_along_axis(logits, ids, axis=1))
    weights = (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)
    ids[rng.random(ids.shape) < no_expert] = -1
    return x, ids, weights


def dump(path, routed, n_experts):
    """Write a batch to exactly this path as an .npz that `load` reads: x as bf16 bits, tokens in rank order."""
    with open(path, "wb") as file:
        np.savez(
            file,
            x=np.concatenate(routed.x).view(np.uint16),
            topk_ids=np.concatenate(routed.topk_ids),
            topk_weights=np.concatenate(routed.topk_weights),
            rank_offsets=np.cumsum([0, *routed.num_tokens]),
            n_experts=n_experts,
        )


@dataclass(frozen=True)
class Batch:
    """A file's content before it is split over ranks. notes: values that were converted, made up or not finite."""

    x: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    rank_offsets: np.ndarray | None
    n_experts: int | None
    notes: list

    def experts_for(self, n_ranks):
        """(n_experts of the file, notes), or else a guess with a note on it."""
        if self.n_experts is not None:
            return self.n_experts, []
        n_experts, note = guessed_experts([self.topk_ids], n_ranks)
        return n_experts, [note]

    def split(self, n_ranks):
        """Routed for n_ranks, split at the file's rank_offsets, else evenly (the first ranks take the remainder)."""
        n = len(self.x)
        ends = self.rank_offsets
        if ends is None:
            ends = np.cumsum([0] + [n // n_ranks + (r < n % n_ranks) for r in range(n_ranks)])
        elif len(ends) != n_ranks + 1:
            raise EPValueError(
                f"rank_offsets in the file is for {len(ends) - 1} ranks, and this run has {n_ranks}: start {len(ends) - 1} "
                "(--ranks, or the -n of mpirun), or leave rank_offsets out (an even split)"
            )
        parts = [slice(int(a), int(b)) for a, b in zip(ends[:-1], ends[1:])]
        return Routed(*([a[p] for p in parts] for a in (self.x, self.topk_ids.astype(np.int32), self.topk_weights)))


def guessed_experts(steps, n_ranks):
    """(the least multiple of n_ranks that holds all ids of these arrays, a note that says so)."""
    largest = max(int(ids.max()) if ids.size else -1 for ids in steps)
    least = max(largest + 1, steps[0].shape[1])
    n_experts = min(-(-least // n_ranks), MAX_EXPERTS // n_ranks) * n_ranks
    rounded = f", rounded up to a multiple of {n_ranks} ranks" if n_experts > least else ""
    why = f"the largest id is {largest}{rounded}" if largest >= 0 else "every id is -1"
    return n_experts, f"n_experts={n_experts}, a guess: {why}; --experts and --ranks change it"


def check_ids(place, ids, n_experts=None):
    """Refuse an id that is no expert, and an expert that a token names twice. place: the words before the token.

    Without n_experts ids may be as large as the project allows.
    """
    outside = (ids < -1) | (ids >= (MAX_EXPERTS if n_experts is None else n_experts))
    if outside.any():
        (token, k), n = np.argwhere(outside)[0], int(outside.sum())
        raise EPValueError(
            f"{place}token {token}, k {k} has expert {ids[token, k]} ({n} such id{'s' * (n > 1)}): an id must be in [0, "
            f"{MAX_EXPERTS if n_experts is None else f'n_experts={n_experts}'}), or -1 for no expert"
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        token, n = int(np.argmax(twice)), int(twice.sum())
        raise EPValueError(
            f"{place}token {token} has experts {ids[token].tolist()}: the experts of a token must be "
            f"distinct ({n} such token{'s' * (n > 1)}); write -1 for the repetition"
        )


def opened(path):
    """A file opened for reading bytes. EPValueError for a folder, and for a pipe or device, which may have no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise EPValueError(f"{path} is not a file: write the data into one")
    return open(path, "rb")


def _arrays(path):
    """{name: array} for the members of an .npz that this module knows."""
    try:
        with opened(path) as file:
            if is_zipfile(file):
                with np.load(file, allow_pickle=False) as members:
                    return {name: members[name] for name in members.files if name in MEMBERS}, members.files
    except EPValueError:
        raise
    except OSError as error:
        raise EPValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged file fails in many ways, in NumPy, zipfile and zlib
        raise EPValueError(
            f"{path} cannot be read as an .npz file of numbers: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None
    raise EPValueError(
        f'{path} cannot be read as an .npz file: np.savez("FILE.npz", topk_ids=ids, x=x, '
        "topk_weights=weights) writes one"
    )


def load(path):
    """Read an .npz of your own routing. An error names what the file holds and what is needed."""
    arrays, names = _arrays(path)
    if "topk_ids" not in arrays:
        raise EPValueError(
            f"{path} has no topk_ids (it has {', '.join(names) or 'nothing'}); needed are topk_ids "
            "(N, K), and if wanted x (N, hidden), topk_weights (N, K), n_experts, rank_offsets"
        )
    notes, ids = [], _integers(arrays, "topk_ids")
    if ids.ndim != 2 or not ids.shape[1]:
        raise EPValueError(f"topk_ids in the file has shape {ids.shape}; (N, K) is needed: N tokens, K ids each")
    if not len(ids):
        raise EPValueError(f"{path} has 0 tokens (topk_ids has shape {ids.shape}): there is nothing to compare")
    check_ids("topk_ids in the file: ", ids)
    x = _as_bf16(arrays["x"], notes) if "x" in arrays else _made_up(len(ids), notes)
    weights = _as_float32(arrays["topk_weights"], notes) if "topk_weights" in arrays else _equal(ids.shape, notes)
    for name, a, needed in (("x", x, "(N, hidden)"), ("topk_weights", weights, "(N, K)")):
        if a.ndim != 2 or len(a) != len(ids) or name != "x" and a.shape != ids.shape:
            raise EPValueError(
                f"{name} in the file has shape {a.shape}; {needed} is needed, and topk_ids (N, K) has {ids.shape}"
            )
    notes += _not_finite("x", "column", x) + _not_finite("topk_weights", "k", weights)
    if (ids < 0).all():
        notes.append("topk_ids: every id is -1, so no token goes to any expert")
    return Batch(x, ids, weights, _offsets(arrays, len(ids)), _n_experts(arrays), notes)


def _offsets(arrays, n):
    if "rank_offsets" not in arrays:
        return None
    offsets = _integers(arrays, "rank_offsets")
    ends = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == n
    if not ends or (offsets[1:] < offsets[:-1]).any():
        raise EPValueError(
            f"rank_offsets in the file is {_short(offsets)}; it must start at 0, never fall and "
            f"end at N={n}: rank r has the tokens rank_offsets[r]:rank_offsets[r + 1]"
        )
    return offsets


def _n_experts(arrays):
    if "n_experts" not in arrays:
        return None
    n_experts = _integers(arrays, "n_experts")
    if n_experts.size != 1:
        raise EPValueError(f"n_experts in the file is {_short(n_experts)}; one number is needed")
    return int(n_experts.reshape(())[()])


def _integers(arrays, name):
    array = arrays[name]
    if array.dtype.kind not in "iu":
        raise EPValueError(f"{name} in the file is {_short(array)} of dtype {array.dtype}; integers are needed")
    return array


def _short(array):
    text = " ".join(str(array.tolist()).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_bf16(x, notes):
    """bf16 from bits (uint16, or the two void bytes that np.save makes of bf16), or rounded from another float type."""
    if x.dtype.kind in "uV" and x.dtype.itemsize == 2:
        return x.astype(x.dtype.newbyteorder("=")).view(ml_dtypes.bfloat16)
    if x.dtype.kind != "f":
        raise EPValueError(f"x in the file has dtype {x.dtype}; floats are needed, or bf16 as uint16 bits")
    notes.append(f"x: {x.dtype} rounded to bfloat16")
    with np.errstate(all="ignore"):
        return x.astype(ml_dtypes.bfloat16)


def _as_float32(weights, notes):
    """float32 from itself, bf16 (bits, as for x), or converted from another real type."""
    if weights.dtype.kind in "uV" and weights.dtype.itemsize == 2:
        weights = weights.astype(weights.dtype.newbyteorder("=")).view(ml_dtypes.bfloat16)
    elif weights.dtype.kind not in "fiu":
        raise EPValueError(
            f"topk_weights in the file has dtype {weights.dtype}; floats are needed, or bf16 as uint16 bits"
        )
    if weights.dtype != np.float32:
        notes.append(f"topk_weights: {weights.dtype} converted to float32")
    with np.errstate(all="ignore"):
        return weights.astype(np.float32)


def _made_up(n, notes):
    notes.append(f"x: not in the file, {n} tokens of {MADE_UP_HIDDEN} elements are made up")
    return np.random.default_rng(0).standard_normal((n, MADE_UP_HIDDEN), np.float32).astype(ml_dtypes.bfloat16)


def _equal(shape, notes):
    notes.append(f"topk_weights: not in the file, {1 / shape[1]:.3g} is used for every id")
    return np.full(shape, 1 / shape[1], np.float32)


def _not_finite(name, column, array):
    """A note that says how many numbers are NaN or infinite, and where the first one is; none if all are finite."""
    wrong = ~np.isfinite(array)
    if not wrong.any():
        return []
    nan, (token, at) = int(np.isnan(array).sum()), np.argwhere(wrong)[0]
    return [
        f"{name}: {nan} NaN and {int(wrong.sum()) - nan} infinite of {array.size} numbers, the first at token "
        f"{token}, {column} {at}; in results every NaN equals every NaN"
    ]
