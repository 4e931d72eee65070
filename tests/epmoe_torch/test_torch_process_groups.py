"""Process groups of torch.distributed as `group`, which is what Megatron's dispatcher has."""

import os
import pickle
import re
import sys
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_tensors import DEVICE

from epmoe import EPConfig, ExpertParallel, device, fused_a2a
from epmoe.torch import (
    ProcessGroupWorld,
    fused_combine,
    fused_dispatch,
    get_buffer,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    process_group,
    reset_hybrid_ep_buffer,
)
from epmoe.torch.process_group import world_of
from epmoe.torch.store_exchange import StoreExchange
from epmoe_ref.errors import EPStateError, EPValueError, PeerTimeout, UnavailableError

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from mpirun import as_torchrun

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "torch.md"

# Results and gradients, computed on each rank with the weights of all ranks' experts.
SHOWN_IS_RIGHT = """
n_ranks, mine = dist.get_world_size(), torch.stack([expert.weight for expert in experts]).detach().float()
of_ranks = [torch.zeros_like(mine) for _ in range(n_ranks)]
dist.all_gather(of_ranks, mine)
weights = torch.cat(of_ranks).requires_grad_()
probs = logits.softmax(1).gather(1, ids)
wanted = ((weights[ids] @ x.float()[:, None, :, None]).squeeze(-1) * probs[..., None]).sum(1)
of_x, of_logits, of_weights = torch.autograd.grad(wanted.square().sum(), (x, logits, weights))
dist.all_reduce(of_weights)
of_mine = torch.stack([expert.weight.grad for expert in experts])
pairs = (out, wanted), (x.grad, of_x), (logits.grad, of_logits), (of_mine, of_weights[4 * rank : 4 * rank + 4])
for got, right in pairs:
    assert torch.allclose(got.float(), right.float(), rtol=0.02, atol=0.02), (got, right)
print(f"rank {rank} of {n_ranks}: as wanted")
"""


@pytest.fixture
def group():
    """The default group of this process alone."""
    if device.SIM:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def has_megatron():
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


needs_megatron = pytest.mark.skipif(not has_megatron(), reason="needs pip install megatron-core==0.16.1")


def over_processes(program, n_ranks, *arguments):
    """Run a program on n_ranks ranks as torchrun does, and look for the line of each."""
    beside = HERE.parent / "fused_a2a", os.environ.get("PYTHONPATH", "")
    given = dict(limit=180, beside=beside, TORCHDYNAMO_DISABLE="1")  # else Megatron compiles long
    if device.SIM:
        given["CUDA_VISIBLE_DEVICES"] = ""
    jobs = as_torchrun(n_ranks, HERE / program, *arguments, **given)
    for rank, job in enumerate(jobs):
        wanted = f"rank {rank} of {n_ranks}: as wanted"
        assert job.status == 0 and wanted in job.output, job.output


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "program", ["process_group_program.py", pytest.param("megatron_program.py", marks=needs_megatron)]
)
@pytest.mark.parametrize(
    "n_ranks, hidden", [(2, 8), pytest.param(torch.cuda.device_count(), 1024, marks=pytest.mark.gpu)]
)
def test_megatrons_calls_and_its_own_dispatcher_need_no_world_and_no_mpi(program, n_ranks, hidden):
    over_processes(program, n_ranks, hidden)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [2, pytest.param(torch.cuda.device_count(), marks=pytest.mark.gpu)])
def test_the_program_of_the_page_runs(n_ranks, tmp_path):
    (program,) = re.findall(r"^```py\n(# layer.py\n.*?)(?=^dist.destroy)", PAGE.read_text(), re.M | re.S)
    file = tmp_path / "layer.py"
    file.write_text(program + SHOWN_IS_RIGHT + "dist.destroy_process_group()\n")
    over_processes(file, n_ranks)


def test_a_group_becomes_a_world_once_and_its_calls_are_the_worlds(group):
    world = world_of(group)
    assert world_of(group) is world and world_of(world) is world and (world.rank, world.size()) == (0, 1)
    x, probs = (torch.rand(4, n, device=DEVICE, requires_grad=True) for n in (8, 1))
    ids = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    rows, *_, handle = fused_dispatch(x, ids, probs, 1, group)
    out, _ = fused_combine(rows * 2, group, handle)
    out.backward(x.detach())
    assert torch.equal(out, x * 2) and torch.equal(x.grad, x * 2) and handle.group is world
    rows, *_, handle = hybrid_ep_dispatch(x.detach().bfloat16(), ids == 0, None, group, 1)
    assert torch.equal(hybrid_ep_combine(rows, handle), x.bfloat16())
    assert get_buffer(group, 16) is fused_a2a.get_buffer(world, 0)
    reset_hybrid_ep_buffer(group)
    get_buffer(group, 0).close()


def test_a_world_made_before_a_groups_first_call_is_its_world(group):
    world = ProcessGroupWorld(timeout=5)
    assert world_of(group) is world and "rank 0 of 1" in repr(world)
    assert get_buffer(group, 0).timeout == 5
    assert world_of(ProcessGroupWorld()) is not world is world_of(group)  # a later one replaces it nowhere
    with pytest.raises(EPStateError, match="this process group has a world already"):
        ProcessGroupWorld(copies=True)
    get_buffer(group, 0).close()


def test_torch_compile_breaks_at_a_call_with_a_process_group(group):
    x, probs = (torch.rand(4, n, device=DEVICE, requires_grad=True) for n in (8, 1))
    ids = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)

    def layer(x):
        rows, _, row_probs, _, handle = fused_dispatch(x, ids, probs, 1, group)
        return fused_combine(rows * row_probs, group, handle)[0] * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*grad attribute of a Tensor")  # torch.compile looks at it
        out = torch.compile(layer, backend="eager")(x)
    out.sum().backward()
    assert torch.equal(out, x * probs * 2) and torch.equal(x.grad, (2 * probs).expand(x.shape))
    get_buffer(group, 0).close()


def test_an_expert_parallel_takes_the_world_of_a_group_but_no_group(group):
    cfg = EPConfig(n_ranks=1, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)
    remedy = r"for a process group of torch, give epmoe.torch.ProcessGroupWorld\(group\)$"
    with pytest.raises(EPValueError, match=f"world must be a LocalWorld.*, not ProcessGroup; {remedy}"):
        ExpertParallel(cfg, group)
    ExpertParallel(cfg, ProcessGroupWorld(group)).close()


@pytest.mark.parametrize("copies", [None, True])
def test_results_may_be_memory_of_torchs_own(group, copies):
    """Megatron takes the memory of what its experts have read, where microbatches overlap."""
    ProcessGroupWorld(copies=copies)
    x, probs = (torch.rand(4, n, device=DEVICE, requires_grad=True) for n in (8, 1))
    ids = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    rows, *_, counts, handle = fused_dispatch(x, ids, probs, 1, group)
    assert rows.untyped_storage().resizable() == bool(copies) and counts.tolist() == [4]
    made = rows.detach() * 2
    if copies:
        rows.untyped_storage().resize_(0)
    out, _ = fused_combine(made, group, handle)
    torch.autograd.backward(rows, out)
    assert torch.equal(out, x * 2) and torch.equal(x.grad, out)
    get_buffer(group, 0).close()


def test_what_is_no_group_of_this_process_is_refused(group, monkeypatch):
    with pytest.raises(EPValueError, match="this process is no member of it"):
        ProcessGroupWorld(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(
        EPValueError,
        match=r"group must be a torch.distributed.ProcessGroup \(of a DeviceMesh: get_group\(\)\), or .*, not int$",
    ):
        ProcessGroupWorld(3)
    kind = {"EPMOE_DEVICE": "sim" if device.SIM else "gpu"}
    monkeypatch.setattr(StoreExchange, "gather", lambda *_: [("here", kind), ("there", kind)])
    with pytest.raises(UnavailableError, match="rank 1 of this process group is on another host than rank 0"):
        ProcessGroupWorld()


def test_without_torch_distributed_the_remedy_is_named():
    with pytest.raises(UnavailableError, match="call torch.distributed.init_process_group first"):
        ProcessGroupWorld()


def over(store):
    """StoreExchanges of two ranks over one store."""
    return [StoreExchange(dist.PrefixStore("one", store), rank, 2) for rank in (0, 1)]


def in_both(call):
    """[call(0), call(1)], each in a thread."""
    told = [None, None]
    threads = [threading.Thread(target=lambda rank=rank: told.__setitem__(rank, call(rank))) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_a_rank_that_stays_away_is_named_and_may_come_later():
    ranks = over(dist.HashStore())
    with pytest.raises(PeerTimeout, match="rank 0, telling: rank 1 did not come; gave up after timeout=0.1 s"):
        ranks[0].gather("telling", "early", 0.1)
    assert ranks[0].hear("telling", "earlier", 0.01) == {0: "early"}
    # the first goes on where it was given up
    for values in (["early", "late"], [10, 11], [[], None]):
        assert in_both(lambda rank, values=values: ranks[rank].gather("telling", values[rank], 20)) == [values, values]


def test_what_was_told_before_a_reset_counts_no_more():
    ranks = over(dist.HashStore())
    with pytest.raises(PeerTimeout):
        ranks[0].gather("telling", "of a call that failed", 0.05)
    in_both(lambda rank: ranks[rank].gather("reset", None, 20))
    told = in_both(lambda rank: ranks[rank].gather("telling", rank, 20))
    assert told == [[0, 1], [0, 1]]


def test_an_end_of_the_store_is_told():
    def new_store(port=0):
        return dist.TCPStore("127.0.0.1", port, is_master=not port, wait_for_workers=False)

    store = new_store()
    other = StoreExchange(new_store(store.port), 1, 2)
    del store
    with pytest.raises(PeerTimeout, match="rank 1, start: whoever serves the store .* has ended|did not come"):
        other.gather("start", None, 1)


def test_what_another_process_puts_into_the_store_is_not_unpickled():
    store = dist.HashStore()
    dist.PrefixStore("one", store).set("0/telling/0/1", pickle.dumps("one"))
    with pytest.raises(ValueError):
        over(store)[0].gather("telling", None, 1)


def test_only_a_process_group_is_taken_for_one():
    known = len(process_group._worlds)
    assert world_of("a world of another kind") == "a world of another kind"
    with pytest.raises(EPValueError, match="group must be a LocalWorld, MPIWorld or ShmemWorld, not str"):
        get_buffer("a world of another kind", 0)
    x, ids = torch.ones(2, 16, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(EPValueError, match="group must be a LocalWorld, MPIWorld or ShmemWorld, not int"):
        fused_dispatch([x, x], [ids, ids], [torch.ones(2, 1)] * 2, 4, 2)
    assert len(process_group._worlds) == known
