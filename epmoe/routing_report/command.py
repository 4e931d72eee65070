"""`epmoe routing FILE`: reads a routing dump and reports its costs, as text, JSON or a page."""

import argparse
import json
import math
import sys
from pathlib import Path

from epmoe.command_line import at_least_one, refuse_to_overwrite
from epmoe.routing_report import dump, page, report, text
from epmoe_ref.config import TOKEN_FORMATS


def _gbps(text_given):
    try:
        value = float(text_given)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text_given!r} must be a positive number of GB/s, for instance 50")
    return value


def add_arguments(parser):
    """Add the options of routing."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="expert ids, topk_ids (tokens, top_k) or (steps, tokens, top_k), in an .npz or "
        ".npy file or as JSON lines; -1 means no expert",
    )
    parser.add_argument(
        "--experts",
        type=at_least_one,
        metavar="N",
        help="number of experts (default: n_experts of the file, else a guess from the largest id)",
    )
    parser.add_argument(
        "--ranks",
        type=at_least_one,
        metavar="N",
        help="number of ranks (default: from the file's rank_offsets, else 8)",
    )
    parser.add_argument(
        "--hidden",
        type=at_least_one,
        metavar="N",
        help=f"elements of a token (default: of the file's x, else {report.DEFAULT_HIDDEN})",
    )
    parser.add_argument("--format", choices=tuple(TOKEN_FORMATS), default="bf16", help="token format (default bf16)")
    parser.add_argument(
        "--link-gbps",
        type=_gbps,
        metavar="GBPS",
        help="link speed: 10**9 bytes a second that a rank can send, and at the same time "
        "receive (default: the links on which our kernels were measured)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--html", metavar="PAGE.html", help="also write a page with a heat map and a comparison of numbers of ranks"
    )


def run(args):
    """Print the report. The exit status is 0, or 2 if the file or the options are invalid."""
    refuse_to_overwrite(args.file, html=(args.html, ".html"))
    found = report.report(
        dump.read(args.file),
        Path(args.file).name.encode("utf-8", "replace").decode(),
        n_experts=args.experts,
        n_ranks=args.ranks,
        hidden=args.hidden,
        token_format=args.format,
        link_gbps=args.link_gbps,
    )
    if args.html:
        Path(args.html).write_text(page.page(found), encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        text.show(found, args.html)
    return 0
