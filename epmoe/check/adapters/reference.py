"""The reference as an implementation. It tests the check itself, and is the shortest example of an adapter."""

import epmoe_ref
from epmoe.check.implementation import OPTIONS, HybridImplementation, Implementation, RowsImplementation
from epmoe_ref import fused_a2a
from epmoe_ref.config import TOKEN_FORMATS


class Reference(Implementation):
    """epmoe_ref.dispatch and epmoe_ref.combine."""

    token_formats = tuple(TOKEN_FORMATS)
    combine_dtypes = ("bf16", "fp16", "fp32")
    options = OPTIONS

    def dispatch(self, input_tokens, topk_ids, **options):
        return epmoe_ref.dispatch(self.cfg, input_tokens, topk_ids, **options)

    def combine(self, expert_outputs, dispatched, router_weights, **options):
        return epmoe_ref.combine(self.cfg, expert_outputs, dispatched, router_weights=router_weights, **options)


class ReferenceRows(RowsImplementation):
    """epmoe_ref.fused_a2a."""

    def dispatch(self, x, token_indices, token_probs, num_experts):
        return fused_a2a.dispatch_forward(x, token_indices, token_probs, num_experts)

    def combine(self, x, handle):
        return fused_a2a.combine_forward(x, handle)

    def dispatch_backward(self, grad_recv_x, grad_recv_token_probs, handle):
        return fused_a2a.dispatch_backward(handle, grad_recv_x, grad_recv_token_probs)

    def combine_backward(self, grad_combined_x, handle):
        return fused_a2a.combine_backward(handle, grad_combined_x)


class ReferenceHybrid(HybridImplementation):
    """epmoe_ref.fused_a2a's hybrid functions."""

    def dispatch(self, x, routing_map, probs, num_local_experts, **options):
        return fused_a2a.hybrid_dispatch_forward(x, routing_map, probs, num_local_experts, **options)

    def combine(self, x, handle):
        return fused_a2a.hybrid_combine_forward(x, handle)

    def dispatch_backward(self, grad_hidden, grad_probs, handle):
        return fused_a2a.hybrid_dispatch_backward(handle, grad_hidden, grad_probs)

    def combine_backward(self, grad_combined_x, handle):
        return fused_a2a.hybrid_combine_backward(handle, grad_combined_x)
