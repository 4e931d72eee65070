"""How Megatron-Core's token dispatcher calls fused_a2a: its two managers, reduced to what touches tensors.

Restated from megatron/core/transformer/moe/token_dispatcher.py (_DeepepManager, _HybridEPManager,
MoEFlexTokenDispatcher) and moe_utils.py (permute, unpermute) of r0.16, and where later releases (0.17 to 0.19) call
otherwise, of these; with their attributes, argument names and order of calls. What a user of this package changes is
the import.
"""

import torch

from epmoe.torch import fused_combine, fused_dispatch, hybrid_ep_combine, hybrid_ep_dispatch, set_deepep_num_sms


class DeepepManager:
    """_DeepepManager of one rank."""

    def __init__(self, group, num_local_experts, router_topk, num_experts, moe_deepep_num_sms=20, capacity_factor=None):
        self.group, self.num_local_experts = group, num_local_experts
        self.router_topk, self.num_experts = router_topk, num_experts
        self.capacity_factor, self.handle = capacity_factor, None
        set_deepep_num_sms(moe_deepep_num_sms)

    def setup_metadata(self, routing_map, probs):
        num_tokens = routing_map.shape[0]
        probs = probs.reshape(num_tokens, self.num_experts)
        self.token_probs, self.token_indices = torch.topk(probs, self.router_topk, dim=-1)
        if self.capacity_factor is not None:
            self.token_indices = self.token_indices.masked_fill(self.token_probs == 0, -1)

    def dispatch(self, hidden_states, async_finish=False, allocate_on_comm_stream=False):
        if self.token_probs.dtype != torch.float32:
            self.token_probs = self.token_probs.float()
        hidden_states, dispatched_indices, dispatched_probs, num_tokens_per_expert, handle = fused_dispatch(
            hidden_states,
            self.token_indices,
            self.token_probs,
            self.num_experts,
            self.group,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        self.handle, self.tokens_per_expert = handle, num_tokens_per_expert
        self.dispatched_indices, self.dispatched_probs = dispatched_indices, dispatched_probs
        return hidden_states

    def get_permuted_hidden_states_by_experts(self, hidden_states):
        self.dispatched_routing_map, self.dispatched_probs = self._indices_to_multihot(
            self.dispatched_indices, self.dispatched_probs
        )
        self.hidden_shape_before_permute = hidden_states.shape
        assert self.dispatched_probs.dtype == torch.float32
        routing_map = self.dispatched_routing_map.bool().T.contiguous()
        of_tokens = (
            torch.arange(len(hidden_states), device=routing_map.device).unsqueeze(0).expand(self.num_local_experts, -1)
        )
        self.reversed_mapping_for_combine = of_tokens.masked_select(routing_map)
        assert len(self.reversed_mapping_for_combine) == self.tokens_per_expert.sum().item()
        permuted_probs = self.dispatched_probs.T.contiguous().masked_select(routing_map)
        return hidden_states.index_select(0, self.reversed_mapping_for_combine), permuted_probs

    def _indices_to_multihot(self, indices, probs):
        batch_size = indices.shape[0]
        shape, where = (batch_size, self.num_local_experts), indices.device
        routing_map = torch.zeros(shape, dtype=torch.long, device=where)
        multihot_probs = torch.zeros(shape, dtype=torch.float, device=where)
        mask = indices != -1
        row_indices = torch.arange(batch_size, device=indices.device).repeat_interleave(mask.sum(dim=1))
        routing_map[row_indices, indices[mask]] = 1
        multihot_probs[row_indices, indices[mask]] = probs[mask]
        return routing_map.bool(), multihot_probs

    def get_restored_hidden_states_by_experts(self, hidden_states):
        out = torch.zeros(self.hidden_shape_before_permute, dtype=hidden_states.dtype, device=hidden_states.device)
        where = self.reversed_mapping_for_combine.unsqueeze(1).expand(-1, out.shape[1])
        return out.scatter_add(0, where, hidden_states)

    def combine(self, hidden_states, async_finish=False, allocate_on_comm_stream=False):
        hidden_states, _ = fused_combine(
            hidden_states,
            self.group,
            self.handle,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        self.handle = None
        return hidden_states


class HybridEPManager:
    """_HybridEPManager of one rank; capacity: of drop_and_pad, where the number of rows is known beforehand."""

    more_of_dispatch, more_of_combine = {}, {}  # what later releases give besides

    def __init__(
        self, group, num_local_experts, num_experts, moe_hybridep_num_sms=16, capacity=None, pad_multiple=None
    ):
        self.group, self.num_local_experts, self.num_experts = group, num_local_experts, num_experts
        self.num_sms, self.capacity = moe_hybridep_num_sms, capacity
        self.drop_and_pad = capacity is not None
        self.num_permuted_tokens, self.pad_multiple, self.handle = None, pad_multiple, None

    def setup_metadata(self, routing_map, probs):
        num_tokens = routing_map.shape[0]
        self.routing_map = routing_map.reshape(num_tokens, self.num_experts)
        self.token_probs = probs.reshape(num_tokens, self.num_experts)
        if self.drop_and_pad:
            of_expert = self.capacity * self.group.size()
            self.num_permuted_tokens = of_expert * self.num_local_experts
            self.tokens_per_expert = torch.full((self.num_local_experts,), of_expert, dtype=torch.long)

    def dispatch(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        if self.token_probs.dtype != torch.float32:
            self.token_probs = self.token_probs.float()
        dispatched_hidden, self.dispatched_probs, _, tokens_per_expert, self.handle = hybrid_ep_dispatch(
            x=hidden_states,
            routing_map=self.routing_map,
            probs=self.token_probs,
            group=self.group,
            num_local_experts=self.num_local_experts,
            num_sms_dispatch_api=self.num_sms,
            num_sms_combine_api=self.num_sms,
            num_permuted_tokens=self.num_permuted_tokens,
            pad_multiple=self.pad_multiple,
            **self.more_of_dispatch,
        )
        if not self.drop_and_pad:
            self.tokens_per_expert = tokens_per_expert
            if self.num_permuted_tokens is None:
                self.num_permuted_tokens = self.tokens_per_expert.sum()
        return dispatched_hidden

    def get_permuted_hidden_states_by_experts(self, hidden_states):
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states):
        return hidden_states

    def combine(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        hidden_states = hybrid_ep_combine(
            x=hidden_states,
            handle=self.handle,
            num_permuted_tokens=self.num_permuted_tokens,
            pad_multiple=self.pad_multiple,
            **self.more_of_combine,
        )
        self.handle = None
        if not self.drop_and_pad:
            self.num_permuted_tokens = None
        return hidden_states


class LaterHybridEPManager(HybridEPManager):
    """_HybridEPManager of 0.17 to 0.19; budget: of rows, with which the host does not wait and overflow is told."""

    more_of_combine = dict(fused=False)
    more_of_dispatch = more_of_combine | dict(
        num_blocks_permute=None, num_blocks_unpermute=None, num_sms_preprocessing_api=108
    )

    def __init__(self, group, num_local_experts, num_experts, budget=None):
        super().__init__(group, num_local_experts, num_experts, None)
        self.budget, self.over_budget = budget, None

    def setup_metadata(self, routing_map, probs):
        super().setup_metadata(routing_map, probs)
        self.num_permuted_tokens = self.budget
        if self.over_budget is None:
            self.over_budget = torch.zeros(1, dtype=torch.bool, device=probs.device)

    def dispatch(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        dispatched_hidden = super().dispatch(hidden_states, async_finish, allocate_on_comm_stream)
        if self.budget is not None:
            over_budget = self.handle[-1] != 0
            self.over_budget |= over_budget
        self.tokens_per_expert = self.tokens_per_expert.to(torch.int64)
        return dispatched_hidden


def layer(manager, hidden_states, routing_map, probs, experts, shared=None):
    """MoEFlexTokenDispatcher around a layer's experts: hidden_states [S, B, H]; shared: output of shared experts."""
    shape = hidden_states.shape
    hidden_states = hidden_states.view(-1, shape[-1])
    manager.setup_metadata(routing_map, probs)
    hidden_states = manager.dispatch(hidden_states, async_finish=True, allocate_on_comm_stream=True)
    rows, row_probs = manager.get_permuted_hidden_states_by_experts(hidden_states)
    rows = experts(rows, manager.tokens_per_expert, row_probs)
    hidden_states = manager.get_restored_hidden_states_by_experts(rows)
    hidden_states = manager.combine(hidden_states, True, True)
    assert manager.handle is None
    if shared is not None:
        hidden_states += shared  # combine_postprocess adds in place
    return hidden_states.view(shape)
