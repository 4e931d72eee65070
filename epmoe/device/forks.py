"""What a world works with belongs to the process that made it; a child that the program forks is told so.

A child has copies of Python's objects, and shares memory of ranks, messages and the GPU with its parent, which would
not know of what it does.
"""

import os
import weakref

from epmoe_ref.errors import EPStateError

_made = weakref.WeakSet()


class _OfAnotherProcess:
    """What belongs_here() was called with, in a child."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise EPStateError(
            f"this process ({os.getpid()}) was forked from the one that made the world: its memory and "
            "its peers belong to that one alone. Make a world in this process, or start processes with "
            'multiprocessing.get_context("spawn")'
        )


def belongs_here(thing):
    """In children that this process forks, any use of the thing raises EPStateError."""
    _made.add(thing)


def is_of_another_process(thing):
    """Whether this process is such a child."""
    return type(thing) is _OfAnotherProcess


def _in_child():
    for thing in list(_made):
        thing.__class__ = _OfAnotherProcess
    _made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
