"""Parameter blocks in device memory, found by what they were made from: a steady state copies no arguments."""

from collections import OrderedDict

MAX_BLOCKS = 256        # that are kept; a steady state uses one or two a rank


class WrittenBlocks:
    """Blocks by key; when there are too many all are given up, once no launch reads them any more."""

    def __init__(self):
        self._blocks, self._in_graphs = OrderedDict(), []

    def __len__(self):
        return len(self._blocks)

    def find(self, key):
        """The Buffer that was written for this key, or None."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def write(self, machine, rank, key, words):
        """A new Buffer with these words, to be found by the key."""
        self.make_room(machine, 1)
        block = self._blocks[key] = machine.alloc(words.nbytes, "parameters", rank=rank)
        block.write(words)
        return block

    def make_room(self, machine, n):
        """Room for n more blocks; where there is none all are given up, which may wait for the launches that use them."""
        if len(self._blocks) + n > MAX_BLOCKS:
            if getattr(machine, "has_captured", False):     # CUDA graphs read their blocks at every replay
                self._in_graphs += self._blocks.values()
                self._blocks.clear()
            else:
                machine.synchronize()
                self.close()

    def close(self):
        """Free all blocks; the launches that use them must have ended."""
        while self._blocks:
            self._blocks.popitem()[1].free()
        while self._in_graphs:
            self._in_graphs.pop().free()
