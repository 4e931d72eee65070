"""Shows lists over ranks to autograd: every tensor in them becomes a separate argument or result.

torch.autograd.Function sees tensors that are arguments, but not those in lists. So a call with lists is flattened:
_OverRanks takes the leaves, passes the lists to the Function's own forward, and returns the leaves of its results.
backward does the same with gradients.
"""

import functools

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

# Function.apply checks in Python for transforms of torch.func, which costs 2 us even if there are none
_has_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def once(backward):
    """once_differentiable, but without its 4 us if autograd records no gradients of the backward."""
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *gradients):
        return (checked if is_grad_enabled() else backward)(ctx, *gradients)

    return run


class WorldFunction(torch.autograd.Function):
    """An autograd Function whose arguments, results and gradients may be lists over ranks, or pairs.

    plain: the same call without gradients. tensors: which arguments may require gradients.
    """

    tensors = slice(0, 3, 2)  # of dispatches: x and probs

    @classmethod
    def apply(cls, *arguments):
        """forward(ctx, *arguments), with a backward for every tensor in them that requires a gradient.

        If none does, plain(*arguments): autograd would cost the host more than 10 us a call.
        """
        if is_dynamo_compiling():
            return cls._apply_uncompiled(*arguments)
        given = arguments[cls.tensors]
        if not is_recorded(*given):  # fused_dispatch and the like have asked, callers of apply() have not
            return cls.plain(*arguments)
        for one in given:
            if isinstance(one, (list, tuple)):
                break
        else:
            above = WorldFunction if _has_transforms() else torch.autograd.Function
            return super(above, cls).apply(*arguments)
        call = _Call(cls, shape_of(arguments))
        results = call.results_of(_OverRanks.apply(call, *leaves_of(arguments)))
        return results if call.several else results[0]

    @classmethod
    @torch.compiler.disable  # torch.compile cannot trace this; it compiles the code before and after
    def _apply_uncompiled(cls, *arguments):
        return cls.apply(*arguments)


class _Call:
    """One flattened call: the Function, the shape of its arguments, and, after forward, the shape of its results.

    several: forward returns a tuple, and backward gets a gradient for each result in it.
    """

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def leaves(self, made):
        """The leaves of forward's results, in order; remembers the results' shape."""
        self.several = isinstance(made, tuple)
        made = made if self.several else (made,)
        self._results = shape_of(made)
        return tuple(leaves_of(made))

    def results_of(self, leaves):
        """Leaves (results or their gradients) put back into lists."""
        return self._results.filled(leaves)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *leaves):
        ctx.call = call
        return call.leaves(call.function.forward(ctx, *call.arguments.filled(leaves)))

    @staticmethod
    @once
    def backward(ctx, *gradients):
        call = ctx.call
        of_arguments = call.function.backward(ctx, *call.results_of(gradients))
        return None, *call.arguments.spread(of_arguments)


class _Leaf:
    """The place of one value in a shape."""

    def filled(self, values):
        return next(values)

    def spread(self, value):
        yield value


class _Branch:
    """A list or tuple of places in a shape."""

    def __init__(self, kind, parts):
        self.kind, self.parts = kind, parts

    def filled(self, values):
        """Put values, in order, into lists and tuples of this shape."""
        values = iter(values)
        return self.kind(part.filled(values) for part in self.parts)

    def spread(self, value):
        """The leaves of a value of this shape; None where the value is None or too short."""
        given = [] if value is None else list(value)
        for part, one in zip(self.parts, given + [None] * (len(self.parts) - len(given))):
            yield from part.spread(one)


def shape_of(value):
    """The structure of nested lists and tuples, without their values."""
    if isinstance(value, (list, tuple)):
        return _Branch(type(value), [shape_of(one) for one in value])
    return _Leaf()


def leaves_of(value):
    """The values in nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves_of(one)]
    return [value]


def is_recorded(*given):
    """Whether autograd or torch.compile must see a call with these tensors, or lists and tuples of them."""
    if is_dynamo_compiling():
        return True
    if is_grad_enabled():
        for one in given:
            if one.requires_grad if type(one) is Tensor else any_gradient((one,)):
                return True
    return False


def any_gradient(given):
    """Whether a tensor in lists and tuples requires a gradient."""
    for one in given:
        if isinstance(one, Tensor):
            if one.requires_grad:
                return True
        elif isinstance(one, (list, tuple)) and any_gradient(one):
            return True
    return False
