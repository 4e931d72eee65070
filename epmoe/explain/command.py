"""`epmoe explain`: writes a small world's round as a page, as figures, and as a trace."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size

import numpy as np

from epmoe.command_line import CANNOT_RUN, DIFFERS, EQUAL, at_least_zero, refuse_to_overwrite, sizes_of_a_world
from epmoe.explain import world as stage
from epmoe.lessons.telling import wrapped
from epmoe_ref.config import MAX_GPUS_PER_NODE, TOKEN_FORMATS, EPConfig
from epmoe_ref.errors import EPError, EPValueError, UnavailableError

RANKS = 3
HIDDEN = 64  # elements of a token, or more if the format needs it


def add_arguments(parser):
    """The options of explain."""
    sizes_of_a_world(
        parser, ranks=RANKS, experts_per_rank=2, top_k=2, hidden=f"{HIDDEN}, or what the format needs", tokens=3
    )
    options = parser.add_argument_group("what runs")
    options.add_argument(
        "--input",
        metavar="FILE.npz",
        help="your own routing (topk_ids and, if you have them, topk_weights, x, n_experts, rank_offsets): "
        f"the page shows a slice, and totals of the whole. Without rank_offsets and --ranks, {stage.RANKS} ranks",
    )
    options.add_argument("--format", choices=tuple(TOKEN_FORMATS), default="bf16", help="token format (default bf16)")
    options.add_argument("--fused", action="store_true", help="record the fused kernels (default: the split ones)")
    options.add_argument(
        "--seed", type=at_least_zero, default=0, help="seed of tokens, routing, experts and schedule (default 0)"
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        default="explain.html",
        metavar="FILE",
        help="the page (default %(default)s); the tape, with every counter of a recorded round, goes to FILE-tape.html",
    )
    files.add_argument(
        "--figures",
        metavar="FOLDER",
        help="each chapter as SVG and PNG files in stages, for slides, and animation.svg (extra `explain`)",
    )
    files.add_argument(
        "--trace",
        metavar="FILE",
        help="a trace for ui.perfetto.dev or chrome://tracing; with a GPU "
        "(and under mpirun) it has times of the device's clock, and nothing else is written",
    )


def config_of(args, n_ranks, of_file=()):
    """The EPConfig that the options describe. of_file: (n_experts, top_k, tokens) of a file, instead of the options'."""
    if n_ranks > MAX_GPUS_PER_NODE:
        raise EPValueError(
            f"n_ranks={n_ranks} must be at most {MAX_GPUS_PER_NODE}: explain shows ranks that write to each other's memory"
        )
    n_experts, top_k, tokens = of_file or (args.experts or n_ranks * args.experts_per_rank, args.top_k, args.tokens)
    hidden = args.hidden or max(HIDDEN, TOKEN_FORMATS[args.format].hidden_multiple)
    return EPConfig(n_ranks, n_experts, top_k, hidden, tokens, token_format=args.format)


def run(args):
    """Record a round and write files. Exit status: 0; 1 if the kernels' results differ from the reference's; or 2."""
    from epmoe import device
    from epmoe.verify.options import BESIDE_A_FILE, OF_A_FILE, given, refuse
    from epmoe.verify.worlds import Worlds

    if args.input:
        refuse([name for name in given(args, add_arguments) if name in OF_A_FILE], BESIDE_A_FILE)
    _refuse_what_cannot_be_written(args)
    try:
        worlds = Worlds("auto")
        if not device.SIM:
            return _stamped(args, worlds)
        if worlds.mpi:
            if worlds.prints:
                sys.stderr.write(
                    "epmoe explain: without GPUs it records all ranks in one process: start it without mpirun\n"
                )
            return CANNOT_RUN
        return _recorded(args)
    except (EPValueError, UnavailableError):
        raise
    except EPError as error:
        sys.stderr.write(f"epmoe explain: {type(error).__name__}: {error}\n")
        return DIFFERS


def _refuse_what_cannot_be_written(args):
    refuse_to_overwrite(args.input, out=(args.out, ".html"), trace=(args.trace, ".json"))
    for option, path in (("--out", args.out), ("--trace", args.trace)):
        if path and Path(path).is_dir():
            raise EPValueError(f"{option} {path} is a folder: name a file")
        if path and not (Path(path).parent.is_dir() and os.access(Path(path).parent, os.W_OK)):
            raise EPValueError(
                f"{option} {path} cannot be written: {Path(path).parent} must be a folder you can write to"
            )
    if args.trace and Path(args.trace).absolute() in (Path(args.out).absolute(), _tape_of(args.out).absolute()):
        raise EPValueError(f"--trace {args.trace} is the file of the page or of the tape: give another name")
    if args.figures and Path(args.figures).is_file():
        raise EPValueError(f"--figures {args.figures} is a file: name a folder")


def _tape_of(out):
    return Path(out).with_name(Path(out).stem + "-tape.html")


def _recorded(args):
    from epmoe.explain import figures, stills, story, tape
    from epmoe.explain.history import History
    from epmoe.explain.inputs import routed_for
    from epmoe.explain.operations import pairs
    from epmoe.explain.recorded_trace import of_recording
    from epmoe.explain.recording import record
    from epmoe.explain.world import drawn as drawn_of

    start = time.perf_counter()
    if args.figures:
        stills.evaluator()  # refuse a missing dukpy before anything is written
    if args.input:
        cfg, routed = _of_file(args)
    else:
        cfg = config_of(args, args.ranks or RANKS)
        routed = routed_for(cfg, args.seed)
    drawn = drawn_of(cfg, routed)
    differences, history = [], None
    link = _tape_of(args.out)
    if drawn.whole is None:
        history = History(record(cfg, routed, fused=args.fused, seed=args.seed))
        differences = history.recording.differences
        _write(link, tape.page(history))
    elif args.trace:
        raise EPValueError(
            f"--trace records every operation, and {sum(routed.num_tokens)} tokens of {cfg.n_ranks} ranks "
            "have too many: choose smaller sizes, or trace a large round on GPUs"
        )
    recordings = pairs()
    html, notes = story.page(drawn, recordings, tape=history and link.name)
    out = _write(args.out, html)
    print(f"{out}: {cfg.n_ranks} ranks x {cfg.n_local_experts} experts, top-{cfg.top_k}; open it in a browser")
    if history:
        print(f"{link}: every counter of a recorded round, {len(history.recording.events):,} operations")
    else:
        old = f"; {link} is of an earlier run" if link.exists() else ""
        print(f"no tape: a world too large to draw has too many operations{old}")
    if args.figures:
        paths, more = figures.write(drawn, args.figures, recordings)
        notes += more
        print(f"{args.figures}: {len(paths)} files, {paths[0].name} to {paths[-1].name}")
    if args.trace:
        print(f"{_write(args.trace, of_recording(history, about(cfg, args)).json())}: open it in ui.perfetto.dev")
    for note in drawn.notes:
        print(wrapped(note, get_terminal_size().columns))
    for note in notes:
        print(note)
    for difference in differences[:3]:
        print(f"DIFFERS from the reference: {difference}")
    print(f"{time.perf_counter() - start:.1f} s")
    return DIFFERS if differences else EQUAL


def _of_file(args):
    """(EPConfig, Routed) of --input. The file gives experts and top-k; --ranks and --experts override it."""
    from epmoe import routing

    batch = routing.load(args.input)
    n_experts, notes = args.experts or batch.n_experts or 0, []
    n_ranks = args.ranks or (
        max(n for n in range(1, stage.RANKS + 1) if n_experts % n == 0)
        if batch.rank_offsets is None
        else len(batch.rank_offsets) - 1
    )
    if not n_experts:
        n_experts, notes = batch.experts_for(n_ranks)
    routing.check_ids("topk_ids in the file: ", batch.topk_ids, n_experts)
    hidden = max(HIDDEN, TOKEN_FORMATS[args.format].hidden_multiple)
    # the page shows the first few numbers of a token, and the tape needs no more
    x = np.zeros((len(batch.x), hidden), batch.x.dtype)
    x[:, : batch.x.shape[1]] = batch.x[:, :hidden]
    routed = replace(batch, x=x).split(n_ranks)
    cfg = config_of(args, n_ranks, (n_experts, batch.topk_ids.shape[1], max(1, *routed.num_tokens)))
    for note in notes:
        print(wrapped(f"note: {note}", get_terminal_size().columns))
    return cfg, routed


def _stamped(args, worlds):
    from epmoe.explain.gpu_round import stamped_rounds
    from epmoe.explain.stamped import of_stamps
    from epmoe.verify.options import given, refuse

    if not args.trace:
        raise EPValueError(
            "on a GPU explain writes a trace: say where with --trace FILE. The page and the figures "
            "come from the simulator: EPMOE_DEVICE=sim epmoe explain"
        )
    of_pages = [name for name in given(args, add_arguments) if name in ("input", "out", "figures")]
    refuse(of_pages, "no meaning on a GPU, where explain writes only a trace: leave it out, or set EPMOE_DEVICE=sim")
    n_ranks = worlds.n_ranks if worlds.mpi else args.ranks or RANKS
    cfg, world = config_of(args, n_ranks), worlds.make(n_ranks, args.seed)
    rounds = stamped_rounds(cfg, world, fused=args.fused, seed=args.seed)
    if worlds.prints:
        text = of_stamps(rounds, about(cfg, args) | {"device": world.machine.describe()}).json()
        print(f"{_write(args.trace, text)}: {len(rounds[-1])} launches with stamps; open it in ui.perfetto.dev")
    return EQUAL


def about(cfg, args):
    """The facts about the run that a trace holds."""
    return {
        "ranks": cfg.n_ranks,
        "experts": cfg.n_experts,
        "top_k": cfg.top_k,
        "hidden": cfg.hidden,
        "tokens": cfg.max_tokens_per_rank,
        "format": cfg.token_format,
        "fused": args.fused,
        "seed": args.seed,
    }


def _write(path, text):
    path = Path(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EPValueError(f"{path} cannot be written: {error.strerror or error}") from None
    return path
