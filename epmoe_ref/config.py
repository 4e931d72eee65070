"""The configuration that all ranks share: sizes, names and options. It is checked once, on construction.

`EPConfig` holds no arrays and no format object; `epmoe_ref.format_of(cfg)` makes the format that it names.
"""

import operator
from dataclasses import KW_ONLY, dataclass, fields

from .errors import EPValueError
from .format_names import TOKEN_FORMATS
from .formats import TokenFormat, format_of

MAX_GPUS_PER_NODE = 8  # ranks that can share one fast interconnect; also the size of the rank completion region
MAX_EXPERTS = 65535  # ids are sent as uint16, and 65535 means -1
READY = 1024  # added to the end rows in region A, so that a written 0 differs from an unwritten one
MAX_INT32 = 2**31 - 1
COMBINE_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class EPConfig:
    """The sizes and options that all ranks of one expert-parallel group share. Checked on construction; hashable.

    n_ranks, n_experts (of all ranks together), top_k (experts of a token), hidden (elements of a token),
    max_tokens_per_rank: all >= 1; top_k <= n_experts; n_experts <= 65535 and a multiple of n_ranks.
    p2p_world_size: consecutive ranks that write each other's memory directly; divides n_ranks. Default min(n_ranks, 8)
        if that divides n_ranks. Smaller than n_ranks only with use_shmem or skip_a2a.
    token_format: "bf16", "fp8_blockwise", "nvfp4", "mxfp4", "mxfp8" or "mxfp4_rows". `print(cfg.format.__doc__)` gives its
        layouts and the multiple that hidden must be.
    alignment: bytes to which each part of a message is padded; a power of two, at least 16 (one vector access).
    fuse_a_scale_preshuffle: mxfp4_rows only: scales in the per-expert slot layout; hidden a multiple of 256.
    combine_dtype: "bf16", "fp16" or "fp32": the type of expert outputs and of the combined result.
    fused_shared_expert: dispatch packs the rank's own tokens first, as group 0; combine adds that expert's output.
    skip_a2a: every rank holds all tokens and keeps the pairs whose expert it owns; nothing is exchanged. The caller
        ensures that all ranks hold the same tokens; this is not checked.
    use_shmem: SHMEM between p2p worlds. Default False, because one host needs none. No effect under skip_a2a.
    allreduce_world_size: W, the number of shares of the shared expert's tokens under skip_a2a; a multiple or a divisor
        of n_ranks, by default n_ranks. A rank takes share rank % W. Ignored (default 1) without a shared expert or
        without skip_a2a.

    Kernels have narrower limits, which their factories check: p2p_world_size <= 8, the fast ones also top_k <= 32. Input
    tokens are bf16; for the bf16 format also fp16 and float32, which are rounded once to nearest even. Errors: EPValueError.
    Source: the parameters of the dispatch_kernel page (docs/pages.md).
    """

    n_ranks: int
    n_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    _: KW_ONLY
    p2p_world_size: int = None  # type: ignore[assignment]    # __post_init__ sets the default
    token_format: str = "bf16"
    alignment: int = 16
    fuse_a_scale_preshuffle: bool = False
    combine_dtype: str = "bf16"
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    use_shmem: bool = False
    allreduce_world_size: int = None  # type: ignore[assignment]    # likewise

    def __post_init__(self):
        _check_types(self)
        _check_experts(self)
        _check_world(self)
        _check_format(self)
        _check_options(self)

    @property
    def n_local_experts(self) -> int:
        """Experts that one rank owns."""
        return self.n_experts // self.n_ranks

    @property
    def n_groups(self) -> int:
        """Groups of output rows: the shared expert, if it is fused, then the local experts."""
        return self.n_local_experts + int(self.fused_shared_expert)

    @property
    def n_src_ranks(self) -> int:
        """Length of the src_rank axis of recv_buf and recv_count: n_ranks, or 1 under skip_a2a."""
        return 1 if self.skip_a2a else self.n_ranks

    @property
    def n_worlds(self) -> int:
        """Number of p2p worlds."""
        return self.n_ranks // self.p2p_world_size

    @property
    def format(self) -> TokenFormat:
        """The reference's token format, `epmoe_ref.format_of(self)`, made at each access."""
        return format_of(self)

    @property
    def combine_itemsize(self) -> int:
        """Bytes of one element of the combined output."""
        return COMBINE_ITEMSIZE[self.combine_dtype]

    def owner(self, expert):
        """The rank that owns a global expert id (a number or an array of ids >= 0)."""
        return expert // self.n_local_experts

    def local_expert(self, expert):
        """The local id of a global expert id on its owner (a number or an array of ids >= 0)."""
        return expert % self.n_local_experts

    def world(self, rank):
        """The p2p world that a rank (a number or an array of ranks) is in."""
        return rank // self.p2p_world_size

    def world_rank(self, rank: int) -> int:
        """The number of a rank within its p2p world."""
        return rank % self.p2p_world_size


def _check_types(cfg: EPConfig) -> None:
    for field in fields(cfg):
        name, value = field.name, getattr(cfg, field.name)
        if field.type in (bool, "bool"):
            if getattr(value, "shape", ()) or value not in (True, False):
                raise EPValueError(f"{name}={value!r} must be True or False")
            object.__setattr__(cfg, name, bool(value))
        elif field.type in (str, "str"):
            if not isinstance(value, str):
                raise EPValueError(f"{name}={value!r} must be a name (a string)")
        elif value is None and name == "p2p_world_size":
            object.__setattr__(cfg, name, _default_p2p_world_size(cfg.n_ranks))
        elif value is None and name == "allreduce_world_size":
            divided = cfg.skip_a2a and cfg.fused_shared_expert
            object.__setattr__(cfg, name, cfg.n_ranks if divided else 1)
        else:
            object.__setattr__(cfg, name, _size(name, value))


def _default_p2p_world_size(n_ranks: int) -> int:
    size = min(n_ranks, MAX_GPUS_PER_NODE)
    if n_ranks % size:
        divisors = [d for d in range(1, MAX_GPUS_PER_NODE + 1) if n_ranks % d == 0]
        raise EPValueError(
            f"p2p_world_size has no default for n_ranks={n_ranks}: a p2p world of the kernels has "
            f"at most {size} ranks, and {size} does not divide n_ranks; lower n_ranks, or give one of {divisors}"
        )
    return size


def _size(name: str, value) -> int:
    if isinstance(value, bool):
        raise EPValueError(f"{name}={value!r} must be a whole number, not a truth value")
    try:
        value = operator.index(value)
    except TypeError:
        raise EPValueError(f"{name}={value!r} must be a whole number (an int)") from None
    if value < 1:
        raise EPValueError(f"{name}={value} must be at least 1")
    if value > MAX_INT32:
        raise EPValueError(f"{name}={value} must be at most {MAX_INT32}: sizes are int32 on the device")
    return value


def _check_experts(cfg: EPConfig) -> None:
    if cfg.n_experts > MAX_EXPERTS:
        raise EPValueError(
            f"n_experts={cfg.n_experts} must be at most {MAX_EXPERTS}: "
            "messages carry ids as uint16 and 65535 stands for -1"
        )
    if cfg.n_experts % cfg.n_ranks:
        raise EPValueError(
            f"n_experts={cfg.n_experts} must be a multiple of n_ranks={cfg.n_ranks}: "
            "change one, or add experts that no token selects"
        )
    if cfg.top_k > cfg.n_experts:
        raise EPValueError(
            f"top_k={cfg.top_k} must be at most n_experts={cfg.n_experts}: the ids of a token are "
            "distinct; lower top_k and leave unused ids at -1"
        )
    rows = cfg.n_src_ranks * cfg.max_tokens_per_rank * min(cfg.top_k, cfg.n_local_experts)
    rows += cfg.max_tokens_per_rank * cfg.fused_shared_expert + 4 * cfg.n_groups
    if rows > MAX_INT32 - READY:
        raise EPValueError(
            f"max_tokens_per_rank={cfg.max_tokens_per_rank} lets one rank receive {rows} rows, and row "
            f"numbers must stay below {MAX_INT32 - READY} (int32 counters): lower max_tokens_per_rank"
        )


def _check_world(cfg: EPConfig) -> None:
    size = cfg.p2p_world_size
    if cfg.n_ranks % size:
        raise EPValueError(f"p2p_world_size={size} must divide n_ranks={cfg.n_ranks}: all p2p worlds have one size")
    if size < cfg.n_ranks and not (cfg.use_shmem or cfg.skip_a2a):
        raise EPValueError(
            f"p2p_world_size={size} is smaller than n_ranks={cfg.n_ranks}, so messages cross p2p worlds: "
            "set use_shmem=True (or skip_a2a=True, which exchanges nothing), or make them equal "
            f"(kernels take at most {MAX_GPUS_PER_NODE} ranks, the reference any number)"
        )


def _check_format(cfg: EPConfig) -> None:
    if cfg.token_format not in TOKEN_FORMATS:
        raise EPValueError(f"token_format={cfg.token_format!r} must be one of {', '.join(TOKEN_FORMATS)}")
    multiple = TOKEN_FORMATS[cfg.token_format].hidden_multiple
    if cfg.hidden % multiple:
        raise EPValueError(
            f"hidden={cfg.hidden} must be a multiple of {multiple} for token_format="
            f"{cfg.token_format!r}: pad the tokens or choose another format"
        )
    if cfg.alignment < 16 or cfg.alignment & (cfg.alignment - 1):
        raise EPValueError(
            f"alignment={cfg.alignment} must be a power of two of at least 16 bytes: "
            "messages are moved 16 bytes at a time"
        )
    if cfg.fuse_a_scale_preshuffle and cfg.token_format != "mxfp4_rows":
        raise EPValueError(
            f"fuse_a_scale_preshuffle=True has a meaning only for token_format='mxfp4_rows', "
            f"not {cfg.token_format!r}: leave it False"
        )
    if cfg.fuse_a_scale_preshuffle and cfg.hidden % 256:
        raise EPValueError(
            f"hidden={cfg.hidden} must be a multiple of 256 with fuse_a_scale_preshuffle=True: "
            "the slot layout holds scales eight at a time; pad the tokens or leave it False"
        )
    if cfg.combine_dtype not in COMBINE_ITEMSIZE:
        raise EPValueError(f"combine_dtype={cfg.combine_dtype!r} must be one of {', '.join(COMBINE_ITEMSIZE)}")


def _check_options(cfg: EPConfig) -> None:
    world = cfg.allreduce_world_size
    if cfg.skip_a2a and cfg.fused_shared_expert and world % cfg.n_ranks and cfg.n_ranks % world:
        raise EPValueError(
            f"allreduce_world_size={world} must be a multiple or a divisor of n_ranks={cfg.n_ranks} "
            "under skip_a2a with a fused shared expert, whose rows those ranks share"
        )
