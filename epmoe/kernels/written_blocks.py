"""Parameter blocks in device memory, found by what they were made from: a steady state copies no arguments."""

from collections import OrderedDict

from epmoe.device.captures import is_seen_captured

MAX_BLOCKS = 256        # that are kept; a steady state uses one or two a rank

_words = {}             # by address, of all blocks of this process


def words_at(address):
    """The words of the parameter block at an address."""
    return _words[address]


class WrittenBlocks:
    """Blocks by key; when there are too many all are given up, once no launch reads them any more.

    But for those of calls that were captured into a CUDA graph, which reads them at every replay.
    """

    def __init__(self):
        self._blocks, self._captured, self._in_graphs, self._machine = OrderedDict(), set(), [], None

    def __len__(self):
        return len(self._blocks)

    def find(self, key):
        """The Buffer that was written for this key, or None."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._note(key)
        return block

    def write(self, machine, rank, key, words):
        """A new Buffer with these words, to be found by the key."""
        self._machine = machine
        self.make_room(machine, 1)
        block = self._blocks[key] = machine.alloc(words.nbytes, "parameters", rank=rank)
        block.write(words)
        _words[block.address] = words
        self._note(key)
        return block

    def _note(self, key):
        if is_seen_captured(self._machine):
            self._captured.add(key)

    def make_room(self, machine, n):
        """Room for n more blocks; where there is none all are given up, which may wait for the launches that use them.

        A call that is being captured waits for nothing: then there are more for a while.
        """
        if len(self._blocks) + n > MAX_BLOCKS and not is_seen_captured(machine):
            machine.synchronize()
            self._in_graphs += [self._blocks.pop(key) for key in self._captured if key in self._blocks]
            self._captured.clear()
            _free(self._blocks.values())
            self._blocks.clear()

    def close(self):
        """Free all blocks; the launches that use them must have ended."""
        _free([*self._blocks.values(), *self._in_graphs])
        self._blocks.clear()
        self._captured.clear()
        self._in_graphs.clear()


def _free(buffers):
    for buffer in buffers:
        _words.pop(buffer.address, None)
        buffer.free()
