"""What is measured: sizes, format and routing of a batch; the sets that a run takes."""

from dataclasses import dataclass, replace

TOKENS = (1, 16, 128, 1024, 4096)
FORMATS = {"bf16": "bf16", "fp8": "fp8_blockwise"}      # name here -> token_format
ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True)
class Shape:
    """tokens of each rank, of `hidden` elements; `experts` in all; format and routing by name."""

    tokens: int
    hidden: int
    experts: int
    top_k: int = 8
    format: str = "bf16"
    routing: str = "uniform"

    def __str__(self):
        return f"{self.tokens}x{self.hidden}/{self.experts}:{self.format}:{self.routing}"


def anchors():
    """The shapes that peers publish numbers for."""
    wide = [Shape(n, 7168, 256) for n in TOKENS]
    made = list(wide)
    made += [replace(s, format="fp8") for s in wide]
    made += [replace(s, routing="zipf") for s in wide if s.tokens in (128, 4096)]
    made += [Shape(n, 4096, 128) for n in (128, 4096)]
    return made


def quick():
    """Few shapes, for a first look."""
    return [Shape(1, 7168, 256), Shape(128, 7168, 256), Shape(128, 7168, 256, format="fp8"), Shape(4096, 7168, 256)]


def parse(text):
    """A Shape from "tokens x hidden / experts", with ":format" and ":routing" if wanted, and "/top_k" after experts.

    "128x7168/256", "128x7168/256/8:fp8:zipf".
    """
    sizes, *rest = text.split(":")
    try:
        tokens, other = sizes.split("x")
        hidden, experts, *top_k = other.split("/")
        shape = Shape(int(tokens), int(hidden), int(experts), *(int(k) for k in top_k))
        for word in rest:
            if word in FORMATS:
                shape = replace(shape, format=word)
            elif word in ROUTINGS:
                shape = replace(shape, routing=word)
            else:
                raise ValueError(f"{word!r} is neither a format {tuple(FORMATS)} nor a routing {ROUTINGS}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"shape {text!r}: {error}; write TOKENSxHIDDEN/EXPERTS[/TOP_K][:FORMAT][:ROUTING], "
                         "as in 128x7168/256:fp8") from None
    return shape
