"""Reads small parts of several Buffers at once: here one after the other, on a GPU with one wait for all."""

import numpy as np


class Reading:
    """Reads on a machine whose memory the host can access."""

    def read(self, parts):
        """[bytes of each part, uint8, when all that is on its stream has ended]; (stream, Buffer, offset, nbytes)."""
        return [buffer.read(np.uint8, (nbytes,), offset) for _, buffer, offset, nbytes in parts]

    def free(self):
        """Nothing."""
