"""Shapes: sizes, format and routing of a batch, and the matrix of shapes of a run."""

import re
from dataclasses import dataclass, replace

TOKENS = (128, 4096, 1, 256, 16, 1024)  # of each rank; the most important come first
MODELS = ((7168, 256), (4096, 128))  # hidden, experts
FORMATS = {"bf16": "bf16", "fp8": "fp8_blockwise"}  # name here -> token_format
ROUTINGS = ("uniform", "zipf")
TOP_K = 8

OF_LOOP = ("1x7168/256", "128x7168/256", "4096x7168/256")


@dataclass(frozen=True)
class Shape:
    """tokens of each rank, of `hidden` elements; `experts` in all; format and routing by name."""

    tokens: int
    hidden: int
    experts: int
    top_k: int = TOP_K
    format: str = "bf16"
    routing: str = "uniform"

    def __str__(self):
        top_k = "" if self.top_k == TOP_K else f"/{self.top_k}"
        return f"{self.tokens}x{self.hidden}/{self.experts}{top_k}:{self.format}:{self.routing}"


def matrix():
    """All tokens, models, formats and routings: the default of a run."""
    return [
        Shape(tokens, hidden, experts, format=format, routing=routing)
        for hidden, experts in MODELS
        for routing in ROUTINGS
        for format in FORMATS
        for tokens in TOKENS
    ]


def parse(text):
    """A Shape from "tokens x hidden / experts", optionally with "/top_k", then ":format" and ":routing".

    For instance "128x7168/256", "128x7168/256/8:fp8:zipf".
    """
    sizes, *rest = text.split(":")
    numbers = re.fullmatch(r"(\d+)x(\d+)/(\d+)(?:/(\d+))?", sizes)
    unknown = [word for word in rest if word not in (*FORMATS, *ROUTINGS)]
    if numbers is None or unknown:
        why = (
            f"{unknown[0]!r} is no format ({', '.join(FORMATS)}) and no routing ({', '.join(ROUTINGS)})"
            if unknown
            else f"{sizes!r} is no TOKENSxHIDDEN/EXPERTS"
        )
        raise ValueError(
            f"shape {text!r}: {why}; write TOKENSxHIDDEN/EXPERTS[/TOP_K][:FORMAT][:ROUTING], as in 128x7168/256:fp8"
        )
    shape = Shape(*(int(n) for n in numbers.groups(default=TOP_K)))
    if not (shape.tokens and shape.hidden and 1 <= shape.top_k <= shape.experts):
        raise ValueError(
            f"shape {text!r}: {shape.tokens} tokens of {shape.hidden} elements to {shape.top_k} of "
            f"{shape.experts} experts must be at least 1 each, and not more than there are: write "
            "TOKENSxHIDDEN/EXPERTS/TOP_K, as in 3x64/4/2; without TOP_K it is 8"
        )
    for word in rest:
        shape = replace(shape, **{"format" if word in FORMATS else "routing": word})
    return shape


def of_row(row):
    """The Shape of a row of results."""
    return Shape(*(row[name] for name in ("tokens", "hidden", "experts", "top_k", "format", "routing")))
