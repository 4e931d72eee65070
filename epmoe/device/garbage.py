"""Switches Python's garbage collector off for a while."""

import contextlib
import gc


@contextlib.contextmanager
def without_collecting():
    """Collect no garbage inside. Context or decorator, for code that makes many objects that stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
