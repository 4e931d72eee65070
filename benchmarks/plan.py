"""The plan of a run: the contenders and shapes that the options choose, by section."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import shapes, targets
from benchmarks.shapes import Shape
from epmoe import device

# section -> description; --only names them
SECTIONS = {
    "fused": "the kernels of pairs, dispatch and combine in a launch each; a token's payload goes to a rank once",
    "plain": "the plain kernels, which do what the specification says (bf16, uniform routing)",
    "split": "the kernels of pairs in two launches each",
    "rows": "fused_a2a's rows, on the device, cached, and with the host waiting",
    "expert-major": "fused_a2a's rows by expert (HybridEP)",
    "sms": "fused, rows and expert-major with few SMs, at many tokens",
    "loop": "pairs of dispatch and combine back to back, wall clock (python -m benchmarks loop)",
    "nccl": "torch's all_to_all_single with a permutation",
    "deepep": "DeepEP V1, low latency and V2",
}
OURS = ("fused", "plain", "split", "rows", "expert-major", "sms")
AGAINST = ("nccl", "deepep")
SHORT = {"pairs": ("fused", "plain", "split")}  # names for several sections
FEW_SMS_TOKENS = 4096  # for sms: many tokens, so that bandwidth counts
# kernels of a target -> section
QUICK = {"pairs fused": "fused", "pairs plain": "plain", "rows": "rows", "expert-major": "expert-major"}


@dataclass(frozen=True)
class Case:
    """One contender at one shape. make(world) builds it."""

    section: str
    kernels: str
    shape: Shape
    sms: int | None
    make: Callable

    def key(self):
        """The key that identifies its rows."""
        return self.kernels, self.shape, self.sms


def add_arguments(parser):
    """Add the options that choose."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="TOKENSxHIDDEN/EXPERTS[/TOP_K][:FORMAT][:ROUTING], formats bf16 and fp8, routings uniform "
        "and zipf (default: 1, 16, 128, 256, 1024 and 4096 tokens, 7168/256 and 4096/128, both "
        "formats, both routings)",
    )
    parser.add_argument(
        "--only",
        metavar="SECTION,...",
        type=lambda text: text.split(","),
        help=f"some of {', '.join(SECTIONS)}; pairs is fused, plain and split (default: all but other libraries)",
    )
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=[], help="other libraries, in the same run")
    parser.add_argument("--quick", action="store_true", help="only shapes with targets, each with its target")
    parser.add_argument(
        "--sms",
        type=int,
        default=targets.FEW_SMS,
        metavar="N",
        help="multiprocessors for the section sms (default %(default)s)",
    )


def has_loop(args):
    """Whether the run ends with the loop section: named, or as part of the whole matrix on a GPU."""
    return "loop" in args.only if args.only else not (args.quick or device.SIM)


def loop_shapes(args):
    """The shapes of the loop section: the given ones that are bf16 and uniform, or its own."""
    given = [shapes.parse(s) for s in args.shapes] if args.shapes else map(shapes.parse, shapes.OF_LOOP)
    return [s for s in given if (s.format, s.routing) == ("bf16", "uniform")]


def as_words(args):
    """The options again, as words of a command line."""
    words = ["--sms", str(args.sms)]
    for name in ("shapes", "against"):
        words += [f"--{name}", *getattr(args, name)] if getattr(args, name) else []
    words += ["--only", ",".join(args.only)] if args.only else []
    return words + ["--quick"] * args.quick


def cases(args):
    """[Case] for the options, shape by shape. Raises ValueError, with an explanation, for invalid options."""
    if args.sms < 2:
        raise ValueError(f"--sms {args.sms} must be at least 2")
    wanted = sections(args)
    if args.quick:
        if args.shapes:
            raise ValueError("--quick has shapes of its own: leave one of --quick and --shapes out")
        return _quick(args, wanted)
    chosen = [shapes.parse(s) for s in args.shapes] if args.shapes else shapes.matrix()
    return [case for shape in chosen for section in wanted for case in _at(section, shape, args.sms)]


def shared_by(cases, n_ranks, is_more=False):
    """Raise ValueError if no case has experts that this many ranks can share. is_more: there are other cases too."""
    if is_more and not cases:
        return
    experts = sorted({case.shape.experts for case in cases})
    if not any(n % n_ranks == 0 for n in experts):
        raise ValueError(
            f"{n_ranks} ranks cannot share {' or '.join(map(str, experts))} experts evenly: choose "
            f"--shapes with a multiple of {n_ranks}, as 128x7168/{n_ranks * (256 // n_ranks or 1)}"
        )


def sections(args):
    """The sections that the options choose, in the order of the table above."""
    named = [*(args.only or OURS), *args.against]
    unknown = [name for name in named if name not in SECTIONS and name not in SHORT]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: no such section; there are {', '.join((*SHORT, *SECTIONS))}")
    meant = {section for name in named for section in SHORT.get(name, (name,))}
    return [section for section in SECTIONS if section in meant]


def _quick(args, wanted):
    made = []
    for kernels, of_kernels in targets.quick().items():
        for shape in of_kernels:
            sections = [QUICK[kernels]] + ["sms"] * (kernels == "rows" and shape.format == "bf16")
            made += [
                c
                for section in sections
                if section in wanted
                for c in _at(section, shape, args.sms)
                if c.kernels == kernels
            ]
    peers_at = [shape for shape in dict.fromkeys(c.shape for c in made) if shape.routing == "uniform"]
    return made + [
        c for shape in peers_at for section in wanted if section in AGAINST for c in _at(section, shape, args.sms)
    ]


def _at(section, shape, sms):
    """The cases of one section at one shape."""
    if section == "loop":
        return []
    if section in ("nccl", "deepep"):
        return [Case(section, name, shape, None, make) for name, make in _others(section, shape)]
    if section == "sms":
        if shape.tokens < FEW_SMS_TOKENS or shape.routing != "uniform":
            return []
        return [
            Case(section, c.kernels, shape, sms, c.make)
            for of in ("fused", "rows", "expert-major")
            for c in _ours(of, shape, sms)[:1]
        ]
    if section == "plain" and (shape.format, shape.routing) != ("bf16", "uniform"):
        return []
    return _ours(section, shape, None)


def _ours(section, shape, sms):
    from benchmarks.pairs import KINDS, Pairs
    from benchmarks.rows import HostWaits, Hybrid, Rows

    if section in KINDS:
        made = [(f"pairs {section}", lambda world: Pairs(world, shape, kind=section, n_sms=sms))]
    elif section == "rows":
        made = [(kind.name, lambda world, kind=kind: kind(world, shape, n_sms=sms)) for kind in (Rows, HostWaits)]
    else:
        made = [(Hybrid.name, lambda world: Hybrid(world, shape, n_sms=sms))]
    return [Case(section, name, shape, sms, make) for name, make in made]


def _others(section, shape):
    if section == "nccl":
        from benchmarks.nccl import Nccl

        return [(Nccl.name, lambda world: Nccl(world, shape))]
    from benchmarks import deepep

    return [(kind.name, lambda world, kind=kind: kind(world, shape)) for kind in deepep.KINDS]
