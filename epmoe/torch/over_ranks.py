"""Shows lists over ranks to autograd: every tensor in them becomes a separate argument or result.

torch.autograd.Function sees tensors that are arguments, but not those in lists. So a call with lists is flattened:
_OverRanks takes the leaves, passes the lists to the Function's own forward, and returns the leaves of its results.
backward does the same with gradients.
"""

import functools
from dataclasses import dataclass
from itertools import chain, repeat

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
        given = arguments[cls.tensors]
        if way_of(cls, *given) is cls.plain:  # fused_dispatch and the like have asked, callers of apply() have not
            return cls.plain(*arguments)
        for one in given:
            if isinstance(one, (list, tuple)):
                break
        else:
            above = WorldFunction if _has_transforms() else torch.autograd.Function
            return super(above, cls).apply(*arguments)
        call = _Call(cls, _form_of(arguments))
        results = _OverRanks.apply(call, *leaves_of(arguments))
        return _filled(call.results, iter(results))


@dataclass
class _Call:
    """One flattened call: the Function, and the forms of its arguments and, after forward, of its results."""

    function: type
    arguments: tuple
    results: object = None


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *leaves):
        ctx.call = call
        made = call.function.forward(ctx, *_filled(call.arguments, iter(leaves)))
        call.results = _form_of(made)
        return tuple(leaves_of(made))

    @staticmethod
    @once
    def backward(ctx, *gradients):
        call = ctx.call
        of_results = _filled(call.results, iter(gradients))
        if not isinstance(of_results, tuple):  # forward returns one result
            of_results = (of_results,)
        return None, *_spread(call.arguments, call.function.backward(ctx, *of_results))


def _form_of(value):
    """The structure of nested lists and tuples, with None for their values."""
    return _filled(value, repeat(None))


def _filled(form, values):
    """The iterator's values, in order, in lists and tuples of this form."""
    if isinstance(form, (list, tuple)):
        return type(form)(_filled(part, values) for part in form)
    return next(values)


def _spread(form, value):
    """The leaves of a value of this form; None where the value is None or too short."""
    if not isinstance(form, (list, tuple)):
        return [value]
    given = [] if value is None else value
    return [leaf for part, one in zip(form, chain(given, repeat(None))) for leaf in _spread(part, one)]


def leaves_of(value):
    """The values in nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves_of(one)]
    return [value]


def way_of(function, *given):
    """How to call a WorldFunction with these tensors, or lists and tuples of them: its plain, or its apply.

    torch.compile cannot trace the call; it compiles the code before and after.
    """
    if is_dynamo_compiling():
        return functools.partial(_uncompiled, function)
    if is_grad_enabled():
        for one in given:
            if one.requires_grad if type(one) is Tensor else any_gradient((one,)):
                return function.apply
    return function.plain


@torch.compiler.disable
def _uncompiled(function, *arguments):
    return function.apply(*arguments)


def any_gradient(given):
    """Whether a tensor in lists and tuples requires a gradient."""
    for one in given:
        if isinstance(one, Tensor):
            if one.requires_grad:
                return True
        elif isinstance(one, (list, tuple)) and any_gradient(one):
            return True
    return False
