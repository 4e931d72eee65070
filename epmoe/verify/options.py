"""The options of `epmoe verify`, and which of them are refused together."""

import argparse

from epmoe.command_line import at_least_one, at_least_zero, kernels_and_world, part_of_all, sizes_of_a_world
from epmoe.verify.checked_rounds import WEIGHTS
from epmoe_ref.config import TOKEN_FORMATS
from epmoe_ref.errors import EPValueError

OF_THE_MATRIX = ("part", "compile", "cc", "sample")  # options that have a meaning only with --all
WITH_BOTH = ("ranks", "seed", "racecheck", "world", "p2p_world_size", "timeout", "json")
WITH_THE_MATRIX = ("all", "kernels", "hidden", *WITH_BOTH, *OF_THE_MATRIX)
WITH_WORDS = ("words", "rounds", *WITH_BOTH)
WORLDS = 14  # of --words: each format twice
OF_A_FILE = ("experts_per_rank", "top_k", "hidden", "tokens", "rounds")  # --input's file says
BESIDE_A_FILE = "no meaning with --input, whose file has its sizes, and one round of them: leave it out"


def _cc(text):
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a compute capability, for instance 9.0")
    return int(major), int(minor)


def add_arguments(parser):
    """Add the options of verify."""
    sizes = sizes_of_a_world(parser)
    sizes.add_argument(
        "--rounds", type=at_least_one, default=3, help="rounds on the same buffers, without a reset (default 3)"
    )
    options = parser.add_argument_group("what runs")
    options.add_argument("--format", choices=tuple(TOKEN_FORMATS), default="bf16", help="token format (default bf16)")
    options.add_argument("--preshuffle", action="store_true", help="with mxfp4_rows: scales in the slot layout")
    options.add_argument("--combine-dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    options.add_argument("--fused", action="store_true", help="fused kernels (default: split)")
    options.add_argument("--shared-expert", action="store_true", help="add an expert that every token uses")
    options.add_argument("--skip-a2a", action="store_true", help="every rank holds all tokens, nothing is exchanged")
    options.add_argument("--weights", choices=WEIGHTS, default="array", help="router weights (default array)")
    options.add_argument("--epilogue", action="store_true", help="apply a function to each element of the result")
    options.add_argument(
        "--seed", type=at_least_zero, default=0, help="seed of tokens, routing, experts and schedule (default 0)"
    )
    options.add_argument("--seeds", type=at_least_one, default=1, metavar="N", help="run N seeds, starting with --seed")
    options.add_argument("--racecheck", action="store_true", help="look for data races (simulator only)")
    kernels_and_world(options)
    files = parser.add_argument_group("files and output")
    files.add_argument(
        "--counters",
        action="store_true",
        help="also show the counters of one rank after each kernel of the first round",
    )
    files.add_argument(
        "--input",
        metavar="FILE.npz",
        help="your own routing: topk_ids (N, K) and, if you have them, x (N, hidden), "
        "topk_weights (N, K), n_experts (or --experts), rank_offsets (ranks + 1)",
    )
    files.add_argument(
        "--dump", metavar="FILE.npz", help="write the first round's tokens and routing as a file for --input"
    )
    files.add_argument("--json", action="store_true", help="print one JSON object instead of pictures")
    files.add_argument(
        "--all", action="store_true", help="run every combination of options, at small sizes and --hidden"
    )
    files.add_argument(
        "--words",
        type=at_least_one,
        nargs="?",
        const=WORLDS,
        metavar="N",
        help="compare every word of the "
        "plain kernels' memory with the model of the protocol, after each half, on N random "
        f"worlds (default {WORLDS})",
    )
    files.add_argument(
        "--part",
        type=part_of_all,
        metavar="I/N",
        help="with --all: run part I of N of the cases, to share them among N processes",
    )
    files.add_argument(
        "--compile",
        type=part_of_all,
        metavar="I/N",
        help="with --all: only compile part I of N of the cases' kernels into the disk cache. On GPUs --all "
        "does this first. With EPMOE_DEVICE=gpu you can run it on a machine without a GPU",
    )
    files.add_argument(
        "--cc", type=_cc, metavar="X.Y", help="with --compile: compute capability of the GPU (default 9.0)"
    )
    files.add_argument(
        "--sample", type=at_least_one, metavar="N", help="with --all: run only N cases, drawn with --seed"
    )


def given(args, add_arguments):
    """The names of a command's options that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return [name for name, default in vars(parser.parse_args([])).items() if getattr(args, name) != default]


def refuse(names, rule):
    """Refuse these options, if there are any."""
    if names:
        raise EPValueError(f"{', '.join('--' + name.replace('_', '-') for name in names)}: {rule}")


def refuse_what_would_be_ignored(args):
    """Refuse options without effect: --all sets sizes and options, only --all has parts, and a file sets its sizes."""
    if args.cc and not args.compile:
        raise EPValueError("--cc: no meaning without --compile: give that too, or leave it out")
    unsummed = [f"--{n.replace('_', '-')}" for n in ("epilogue", "shared_expert") if getattr(args, n)]
    if args.weights == "none" and unsummed and not (args.all or args.words):
        raise EPValueError(
            f"{', '.join(unsummed)}: no meaning with --weights none, which leaves rows unsummed: "
            "leave that out, or --weights none"
        )
    names = given(args, add_arguments)
    if args.all:
        return refuse(
            [name for name in names if name not in WITH_THE_MATRIX],
            "no meaning with --all, which runs every combination of options, at small sizes: leave it out, or --all",
        )
    refuse(
        [name for name in names if name in OF_THE_MATRIX], "no meaning without --all: give that too, or leave it out"
    )
    if args.words:
        return refuse(
            [name for name in names if name not in WITH_WORDS],
            "no meaning with --words, which draws random worlds: leave it out, or --words",
        )
    if args.input:
        refuse([name for name in names if name in OF_A_FILE], BESIDE_A_FILE)
