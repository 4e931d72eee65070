"""Exchange between ranks over a communicator that moves messages only when it is polled."""

import pickle
import time
from types import SimpleNamespace

import pytest

from epmoe.worlds import exchange as exchanges
from epmoe.worlds.plain_data import encode
from epmoe_ref.errors import PeerTimeout


class Request:
    """A message that leaves after this many polls of its sender; None: never."""

    def __init__(self, looks):
        self.looks = looks

    def Test(self):
        self.looks = None if self.looks is None else max(0, self.looks - 1)
        return self.looks == 0


class Message:
    def __init__(self, raw):
        self.raw = raw

    def Recv(self, into):
        into[0][:] = self.raw


class Status:
    def Get_count(self, kind):
        return self.count


MPI = SimpleNamespace(BYTE=object(), Status=Status)


class Communicator:
    """Rank 0 of three. `told`: the values that each peer has sent; `looks`: see Request."""

    def __init__(self, told, looks):
        self.told, self.looks, self.requests, self.resets = dict(told), looks, [], 0

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 3

    def Isend(self, given, peer, tag):
        assert isinstance(given[0], bytes) and given[1] is MPI.BYTE
        self.requests.append(Request(self.looks))
        return self.requests[-1]

    def Improbe(self, source, tag, status):
        if source not in self.told:
            return None
        told = self.told.pop(source)
        message = Message(told if isinstance(told, bytes) else encode((self.resets, told)))
        status.count = len(message.raw)
        return message


def Exchange(comm):
    return exchanges.Exchange(comm, MPI)


def test_what_a_rank_tells_has_left_it_when_it_goes_on():
    comm = Communicator({1: "one", 2: "two"}, looks=20)
    assert Exchange(comm).gather("telling", "own", 30.0) == ["own", "one", "two"]
    assert len(comm.requests) == 2 and all(r.looks == 0 for r in comm.requests)


def test_a_peer_that_takes_no_message_does_not_hold_the_others_beyond_the_timeout():
    began = time.monotonic()
    assert Exchange(Communicator({1: 1, 2: 2}, looks=None)).gather("telling", 0, 0.2) == [0, 1, 2]
    assert 0.2 <= time.monotonic() - began < 5


def test_who_tells_nothing_is_named():
    with pytest.raises(
        PeerTimeout, match="rank 0, telling: rank 2 did not come; gave up after timeout=0.1 s: has it ended"
    ):
        Exchange(Communicator({1: 1}, looks=1)).gather("telling", 0, 0.1)


def test_who_came_early_is_seen_and_counted_once():
    comm = Communicator({2: "two"}, looks=1)
    exchange = Exchange(comm)
    assert exchange.came("telling") == exchange.came("telling") == {2: "two"} and exchange.came("start") == {}
    comm.told = {1: "one"}
    assert exchange.gather("telling", "own", 30.0) == ["own", "one", "two"]
    assert exchange.came("telling") == {} and len(comm.requests) == 2


def test_who_came_after_a_timeout_is_seen_too():
    comm = Communicator({1: "one"}, looks=1)
    exchange = Exchange(comm)
    with pytest.raises(PeerTimeout):
        exchange.gather("telling", "own", 0.01)
    comm.told = {2: "two"}
    assert exchange.came("telling") == {2: "two"}
    assert exchange.gather("telling", "again", 30.0) == ["own", "one", "two"]


def test_what_was_told_before_a_reset_counts_no_more():
    comm = Communicator({1: None, 2: None}, looks=1)
    exchange = Exchange(comm)
    exchange.gather("reset", None, 30.0)
    comm.told = {1: "of a call that failed"}
    with pytest.raises(PeerTimeout, match="rank 1, 2 did not come"):
        exchange.gather("telling", "own", 0.05)
    comm.told, comm.resets = {1: "one", 2: "two"}, 1
    assert exchange.gather("telling", "own", 30.0) == ["own", "one", "two"]


def test_who_does_not_come_in_time_is_not_heard():
    assert Exchange(Communicator({1: "one"}, looks=1)).hear("late calls", "own", 0.05) == {0: "own", 1: "one"}


def test_what_another_process_sends_is_not_unpickled():
    with pytest.raises(ValueError):
        Exchange(Communicator({1: pickle.dumps((0, "one"))}, looks=1)).gather("telling", "own", 0.05)
