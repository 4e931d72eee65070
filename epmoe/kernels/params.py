"""The parameter block: everything a kernel is called with, as uint64 words in device memory, under the pages' names."""

import numpy as np

from epmoe_ref.errors import EPValueError


class ParameterBlock:
    """The offset of each named field in a kernel's parameter block, in bytes.

    fields: (name, number of words) in order. A float32 or int32 sits in the low half of its word.
    """

    def __init__(self, *fields):
        self._places, n_words = {}, 0
        for name, length in fields:
            self._places[name] = (n_words, length)
            n_words += length
        self.n_words = n_words

    def __contains__(self, name: str) -> bool:
        """Whether there is a field of that name."""
        return name in self._places

    def offset(self, name: str) -> int:
        """Byte offset of a field; a constant for the kernels."""
        return 8 * self._places[name][0]

    def pack(self, values: dict, tail=()) -> np.ndarray:
        """The words [n_words + len(tail)] uint64; `tail` (the arguments of user functions) follows the last field.

        A value is a number or a sequence of them; a field that is not given is zero.
        """
        words = np.zeros(self.n_words + len(tail), np.uint64)
        for name, value in values.items():
            at, length = self._places[name]
            value = value if isinstance(value, (list, tuple)) else [value]
            if len(value) != length:
                raise EPValueError(f"{name} takes {length} words, not {len(value)}")
            words[at:at + length] = value
        words[self.n_words:] = tail
        return words


def float32_word(value) -> int:
    """A float32 as a word of the block."""
    return int(np.float32(value).view(np.uint32))
