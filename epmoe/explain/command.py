"""`python -m epmoe explain`: a small world's round as a page, as figures, and as a trace."""

import sys
import time
from pathlib import Path

from epmoe_ref.config import MAX_GPUS_PER_NODE, TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

from epmoe.command_line import at_least_zero, sizes_of_a_world

RIGHT, DIFFERS, CANNOT_RUN = 0, 1, 2
RANKS = 3
MOST_SLOTS = 1024   # slots of a page's tokens: a minute, and some megabytes
HIDDEN = 64         # elements of a token, or more where the format needs it


def add_arguments(parser):
    """The options of explain."""
    sizes_of_a_world(parser, ranks=RANKS, experts_per_rank=2, top_k=2, hidden=f"{HIDDEN}, or what the format needs",
                     tokens=4)
    options = parser.add_argument_group("what runs")
    options.add_argument("--format", choices=tuple(TOKEN_FORMATS), default="bf16", help="token format (default bf16)")
    options.add_argument("--fused", action="store_true", help="fused kernels, which send a token to a rank once "
                         "(default: split ones, which send every message whole)")
    options.add_argument("--seed", type=at_least_zero, default=0,
                         help="of tokens, routing, experts and schedule (default 0)")
    files = parser.add_argument_group("files")
    files.add_argument("--out", default="explain.html", metavar="FILE", help="the page (default %(default)s)")
    files.add_argument("--figures", metavar="FOLDER", help="the same figures as SVG files, and dispatch.svg, which has "
                       "dispatch in one picture")
    files.add_argument("--png", action="store_true", help="with --figures: PNG files too (extra `explain`)")
    files.add_argument("--trace", metavar="FILE", help="a trace for ui.perfetto.dev or chrome://tracing; with a GPU "
                       "(and under mpirun) it has times of the device's clock, and is all that is written")


def config_of(args, n_ranks):
    """The EPConfig that the options describe."""
    if n_ranks > MAX_GPUS_PER_NODE:
        raise EPValueError(f"--ranks {n_ranks} must be at most {MAX_GPUS_PER_NODE}, the ranks that write each other's "
                           "memory")
    hidden = args.hidden or max(HIDDEN, TOKEN_FORMATS[args.format].hidden_multiple)
    return EPConfig(n_ranks, args.experts or n_ranks * args.experts_per_rank, args.top_k, hidden, args.tokens,
                    token_format=args.format)


def run(args):
    """Record and write; the exit status is 0, 1 if the kernels' results differ from the reference's, or 2."""
    from epmoe import device
    from epmoe.verify.worlds import Worlds

    try:
        if args.png and not args.figures:
            raise EPValueError("--png writes the figures as PNG files too: say where with --figures FOLDER")
        worlds = Worlds("auto")
        if not device.SIM:
            return _stamped(args, worlds)
        if worlds.mpi:
            if worlds.prints:
                sys.stderr.write("epmoe explain: without GPUs it records all ranks in one process: start it without "
                                 "mpirun\n")
            return CANNOT_RUN
        return _recorded(args)
    except (EPValueError, UnavailableError) as error:
        sys.stderr.write(f"epmoe explain: {error}\n")
        return CANNOT_RUN
    except EPError as error:
        sys.stderr.write(f"epmoe explain: {type(error).__name__}: {error}\n")
        return DIFFERS


def _recorded(args):
    from epmoe.explain import figures, page, recorded_trace
    from epmoe.explain.history import History
    from epmoe.explain.recording import record

    start = time.perf_counter()
    cfg = config_of(args, RANKS if args.ranks is None else args.ranks)
    slots = cfg.n_ranks * cfg.max_tokens_per_rank * cfg.top_k
    if slots > MOST_SLOTS:
        raise EPValueError(f"{cfg.n_ranks} ranks x {cfg.max_tokens_per_rank} tokens x top-{cfg.top_k} are up to "
                           f"{slots} messages, and a page shows at most {MOST_SLOTS}: take fewer --tokens; a trace of "
                           "a large round is made on GPUs")
    if args.png:
        figures.needs_resvg()
    recording = record(cfg, fused=args.fused, seed=args.seed)
    history = History(recording)
    out = _write(args.out, page.page(history))
    print(f"{out}: {cfg.n_ranks} ranks x {cfg.n_local_experts} experts, top-{cfg.top_k}, {cfg.token_format}, "
          f"{len(recording.events)} recorded events; open it in a browser")
    if args.figures:
        paths = figures.write(history, args.figures, ("svg", "png") if args.png else ("svg",))
        print(f"{args.figures}: {', '.join(p.name for p in paths)}")
    if args.trace:
        print(f"{_write(args.trace, recorded_trace.of_recording(history, about(recording.cfg, args)).json())}: "
              "open it in ui.perfetto.dev")
    for difference in recording.differences[:3]:
        print(f"DIFFERS from the reference: {difference}")
    print(f"{time.perf_counter() - start:.1f} s")
    return DIFFERS if recording.differences else RIGHT


def _stamped(args, worlds):
    from epmoe.explain.gpu_round import stamped_rounds
    from epmoe.explain.stamped import of_stamps

    if not args.trace:
        raise EPValueError("on a GPU explain writes a trace: say where with --trace FILE. The page and the figures "
                           "come from the simulator: EPMOE_DEVICE=sim python -m epmoe explain")
    n_ranks = worlds.n_ranks if worlds.mpi else RANKS if args.ranks is None else args.ranks
    cfg, world = config_of(args, n_ranks), worlds.make(n_ranks, args.seed)
    rounds = stamped_rounds(cfg, world, fused=args.fused, seed=args.seed)
    if worlds.prints:
        text = of_stamps(rounds, about(cfg, args) | {"device": world.machine.describe()}).json()
        print(f"{_write(args.trace, text)}: {len(rounds[-1])} launches with stamps; open it in ui.perfetto.dev")
    return RIGHT


def about(cfg, args):
    """What a trace says of the run."""
    return {"ranks": cfg.n_ranks, "experts": cfg.n_experts, "top_k": cfg.top_k, "hidden": cfg.hidden,
            "tokens": cfg.max_tokens_per_rank, "format": cfg.token_format, "fused": args.fused, "seed": args.seed}


def _write(path, text):
    path = Path(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EPValueError(f"{path} cannot be written: {error.strerror or error}") from None
    return path
