"""When garbage is not collected."""

import contextlib
import gc


@contextlib.contextmanager
def without_collecting():
    """No garbage is collected meanwhile; also a decorator. For what makes many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
