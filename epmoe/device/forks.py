"""A world belongs to the process that made it. Using it in a forked child raises an error.

A child has copies of Python's objects, but shares the ranks' memory, messages and the GPU with its parent. The parent
would not notice the child's changes.
"""

import os
import weakref

from epmoe_ref.errors import EPStateError

_made = weakref.WeakSet()


class _OfAnotherProcess:
    """Replaces the argument of belongs_here() in a child."""

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
    """True if this process is such a child."""
    return type(thing) is _OfAnotherProcess


def _in_child():
    for thing in list(_made):
        thing.__class__ = _OfAnotherProcess
    _made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
