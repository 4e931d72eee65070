"""What one rank does to tell the others something, over a communicator that moves messages only while it is asked."""

import time

import pytest
from epmoe.worlds.exchange import Exchange

from epmoe_ref.errors import PeerTimeout


class Request:
    """A message that leaves after its sender has looked at it so many times; never for None."""

    def __init__(self, looks):
        self.looks = looks

    def Test(self):
        self.looks = None if self.looks is None else max(0, self.looks - 1)
        return self.looks == 0


class Message:
    def __init__(self, value):
        self.value = value

    def recv(self):
        return self.value


class Communicator:
    """Rank 0 of three. `told`: what each peer has sent; `looks`: see Request."""

    def __init__(self, told, looks):
        self.told, self.looks, self.requests = dict(told), looks, []

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 3

    def isend(self, value, peer, tag):
        self.requests.append(Request(self.looks))
        return self.requests[-1]

    def improbe(self, source, tag):
        return Message(self.told.pop(source)) if source in self.told else None


def test_what_a_rank_tells_has_left_it_when_it_goes_on():
    comm = Communicator({1: "one", 2: "two"}, looks=20)
    assert Exchange(comm).gather("telling", "own", 30.0) == ["own", "one", "two"]
    assert len(comm.requests) == 2 and all(r.looks == 0 for r in comm.requests)


def test_a_peer_that_takes_no_message_does_not_hold_the_others_beyond_the_timeout():
    began = time.monotonic()
    assert Exchange(Communicator({1: 1, 2: 2}, looks=None)).gather("telling", 0, 0.2) == [0, 1, 2]
    assert 0.2 <= time.monotonic() - began < 5


def test_who_tells_nothing_is_named():
    with pytest.raises(PeerTimeout, match="rank 0, telling: rank 2 did not come; gave up after timeout=0.1 s"):
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
