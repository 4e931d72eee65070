"""Makes a process group of torch.distributed a world of epmoe, so Megatron's `group` works unchanged, without MPI."""

import os
import socket
import weakref

import torch
import torch.distributed as dist

from epmoe import device
from epmoe.device.cuda_stream import handle_of
from epmoe.torch.store_exchange import StoreExchange, count, store_of
from epmoe.worlds import agreement
from epmoe.worlds.mpi import MPIWorld
from epmoe.worlds.time_limit import seconds
from epmoe_ref.errors import EPStateError, EPValueError, UnavailableError

_worlds = weakref.WeakKeyDictionary()  # process group -> ProcessGroupWorld


class ProcessGroupWorld(MPIWorld):
    """The ranks of a process group (default: of all ranks), all on one host; this process is one of them.

    epmoe.torch makes one of a group at the group's first call. Make it yourself, before that call, to choose a `stream`
    or to use an ExpertParallel under torchrun. It extends MPIWorld. Its ranks exchange plain data through the
    group's store. The GPU is torch's current one.

    copies: whether results of epmoe.torch are copied into torch's own memory; default: only in calls made while torch's
    current stream is not the world's. timeout [s]: for all ranks to arrive here, and at any call of fused_a2a. The
    default is as long as NCCL's, since a rank may be writing a checkpoint, and torchrun ends all ranks if one has
    failed.
    """

    def __init__(self, group=None, *, stream=None, copies=None, timeout=600.0):
        group, self.copies, self.timeout = _checked(group), copies, seconds("timeout", timeout)
        if group in _worlds and (stream is not None or copies is not None):
            raise EPStateError(
                "this process group has a world already, which its first call made, or an earlier ProcessGroupWorld: "
                "stream= and copies= must be given before that call"
            )
        self.rank, self.n_ranks = group.rank(), group.size()
        self.ranks = range(self.rank, self.rank + 1)
        self.exchange = StoreExchange(store_of(group), self.rank, self.n_ranks)
        self._meet(timeout)
        count(group)
        self.host = self  # all ranks are on one
        if device.SIM:
            self._simulate({})
        else:
            self._take_gpu(torch.cuda.current_device(), handle_of(stream), timeout)
        _worlds.setdefault(group, self)  # handles belong to the first one

    def _meet(self, timeout):
        kind = {"EPMOE_DEVICE": "sim" if device.SIM else "gpu"}
        told = self.exchange.gather("meeting", (_host(), kind), timeout)
        elsewhere = [rank for rank, (host, _) in enumerate(told) if host != told[0][0]]
        if elsewhere:
            raise UnavailableError(
                f"rank {elsewhere[0]} of this process group is on another host than rank 0: its "
                "ranks write each other's memory, so they must be on one host and in one container. "
                "Use a group on one host; an ExpertParallel serves several, with a ShmemWorld"
            )
        agreement.same("simulator or GPU", [kind for _, kind in told])

    def Get_rank(self):
        """This rank's number on its host, by MPI's name."""
        return self.rank


def world_of(group):
    """The world of a group. A world is returned unchanged. A process group's first call makes one, on all ranks."""
    if hasattr(group, "lists"):
        return group
    if not isinstance(group, getattr(dist, "ProcessGroup", ())):
        if not (dist.is_available() and dist.is_initialized()):
            return group  # the caller refuses it
        group = _checked(group)  # raises, but None is the group of all ranks
    return _worlds.get(group) or ProcessGroupWorld(group)


def _checked(group):
    if not dist.is_available() or not dist.is_initialized():
        raise UnavailableError(
            "torch.distributed has no process group: call torch.distributed.init_process_group "
            "first, in every process that torchrun has started"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise EPValueError(
            f"group is {group!r}: this process is no member of it; only members make its world"
            if group is dist.GroupMember.NON_GROUP_MEMBER
            else "group must be a torch.distributed.ProcessGroup (of a DeviceMesh: get_group()), or a LocalWorld, "
            f"MPIWorld or ShmemWorld, not {type(group).__name__}"
        )
    return group


def _host():
    """An identity that differs between hosts, and between containers that do not share a network."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname(), ""
