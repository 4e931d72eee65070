"""Which arguments ask for gradients, and where there are none to be had."""

from epmoe.torch.over_ranks import any_gradient
from epmoe_ref.errors import EPValueError


def ask_for_gradients(given):
    """Whether a tensor, or one of those in lists, requires a gradient."""
    return any_gradient((given,))


def refuse_gradients(what, *given):
    """Raise EPValueError if anything given requires a gradient: torch would round one of FP8 rows to FP8."""
    if ask_for_gradients(given):
        raise EPValueError(
            f"{what} gives FP8 rows, through which torch passes no gradient that is worth having, but x "
            "or the probs require one: give them detached, or write a Function that dequantises between "
            "forward and backward of epmoe.fused_a2a"
        )
