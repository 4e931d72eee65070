"""The kinds of small worlds in which mutants run, and their options."""

from dataclasses import KW_ONLY, dataclass, field

from epmoe_ref.config import EPConfig


@dataclass(frozen=True, eq=False)
class SmallWorld:
    """Options of every world. shape: blocks, threads. constants: smaller values for constants of the kernel package."""

    name: str
    _: KW_ONLY
    shape: tuple = (3, 64)
    constants: dict = field(default_factory=dict)  # {"wait.POLLS_PER_LOOK": 1}


@dataclass(frozen=True, eq=False)
class PageWorld(SmallWorld):
    """A world of the kernels of pairs (ExpertParallel).

    sizes: of its EPConfig. tokens: for each round, the tokens of each rank.
    """

    sizes: dict
    tokens: tuple
    _: KW_ONLY
    fused: bool = False

    @property
    def cfg(self):
        return EPConfig(**self.sizes)


@dataclass(frozen=True, eq=False)
class World(PageWorld):
    """One world of direct kernel calls (world_run.py), all rounds in flight at once.

    tuning: changed tuning numbers of the fast kernels. without_signals: a fused combine uses none, as in an
    ExpertParallel. unreduced: combine without router weights. swiglu: its kernel runs too. bad_ids: ids out of range
    and repeated ones in device memory. elsewhere: no token goes to its own rank. absent: ranks that launch nothing, so
    that the others' waits must expire. stuck: before this half of the first round ("dispatch", "combine") a word of
    `finished` is overwritten on rank 0, so that rank 1 never gets its signal (expired.py). slow: ranks that are far
    slower than the others. from_expert: a rank's experts below it get nothing.
    """

    tuning: dict = field(default_factory=dict)
    without_signals: bool = False
    unreduced: bool = False
    swiglu: bool = False
    bad_ids: bool = False
    elsewhere: bool = False
    absent: tuple = ()
    stuck: str = ""
    slow: tuple = ()
    from_expert: int = 0

    @property
    def fails(self):
        """Whether waits must expire in this world."""
        return bool(self.absent or self.stuck)


@dataclass(frozen=True, eq=False)
class PlainWorld(World):
    """One world of the plain kernels (plain_run.py). weights: "array" or "function"; epilogue: "", "value" or "stores".
    combine_dtype of its sizes is bf16. input_type: of the tokens."""

    weights: str = "array"
    epilogue: str = ""
    input_type: str = "bf16"


@dataclass(frozen=True, eq=False)
class RowsWorld(SmallWorld):
    """One world of the rows kernels (rows_run.py).

    kind: "rows" (FusedDispatch, FusedCombine) or "hybrid" (HybridEP). tokens: of each rank. limit: rows of a rank in
    HybridEP; None: exact results. pad: each expert's number of rows is rounded up to a multiple of it. fp8: rows are
    sent as blockwise FP8. local: experts of a rank. combines: more combines in a row, and cached dispatches. on_device:
    also dispatches that the device counts, in flight together. slow: ranks that are far slower than the others.
    full_heap: ranks without free memory for results. asks: there is room for one token of each rank
    before the first call. bad_ids: invalid and repeated ids, in device memory. absent: as in World. mute: ranks that
    launch only their leader block from the first combine on: they begin calls, but send no rows.
    pairs: tokens are pairs of e4m3 values and scales. dtype: of the first rows that are summed. from_expert: a rank's
    experts below it get nothing. trace: with stamps. stale: strong loads return older values. brief: one call of each
    kind. between: combines, and between them dispatches of at most `few` tokens of a rank. wide: columns of these
    dispatches, which then come after dispatches of all tokens. crowded: hybrid dispatches of more tokens than there is
    room for, which no rank may send (results are not checked).
    """

    kind: str
    tokens: tuple = (5, 3)
    hidden: int = 16
    limit: int | None = 0
    pad: int = 0
    fp8: bool = False
    top_k: int = 2
    local: int = 2
    p2p_world_size: int | None = None
    combines: int = 0
    on_device: bool = False
    slow: tuple = ()
    full_heap: tuple = ()
    asks: bool = False
    bad_ids: bool = False
    absent: tuple = ()
    mute: tuple = ()
    pairs: bool = False
    dtype: str = "bfloat16"
    from_expert: int = 0
    id_dtype: str = "int64"
    trace: bool = False
    stale: bool = False
    brief: bool = False
    between: bool = False
    few: int = 2
    wide: int = 0
    crowded: bool = False

    @property
    def n_ranks(self):
        return len(self.tokens)

    @property
    def left_out(self):
        """Ranks for which the others' waits must expire."""
        return self.absent or self.mute

    @property
    def n_experts(self):
        return self.local * self.n_ranks


@dataclass(frozen=True, eq=False)
class PublicWorld(PageWorld):
    """One world of ExpertParallel (public_run.py), with options that other worlds leave at their defaults.

    weights: "array", "function" or "none". epilogue: with one. edges: tokens for which number formats differ. scaled:
    with an input scale. to_one: every token goes only to the last expert. trace: with stamps.
    """

    _: KW_ONLY
    fused: bool = True
    weights: str = "array"
    epilogue: bool = False
    edges: bool = False
    scaled: bool = False
    to_one: bool = False
    trace: bool = False


@dataclass(frozen=True, eq=False)
class SwigluWorld(SmallWorld):
    """One world of the SwiGLU kernel (swiglu_run.py). groups: rows of each. limit: of the clamped variant."""

    _: KW_ONLY
    groups: tuple = (4, 0, 5)
    width: int = 40
    fp8: bool = False
    limit: float | None = None
    shared: bool = False
    shape: tuple = (2, 64)
