"""epmoe.torch on a GPU: the tests of test_fused_a2a_autograd.py, with tensors that lie there."""

import pytest
from test_fused_a2a_autograd import (rng, test_gradients_by_expert_are_adjoint_through_autograd,
                                     test_gradients_of_rows_are_adjoint_through_autograd,
                                     test_on_device_the_rows_that_hold_tokens_have_the_same_gradients,
                                     test_one_rank_a_process_takes_and_gives_tensors,
                                     test_results_that_get_no_gradient_count_as_zero)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

__all__ = ["rng", "test_gradients_by_expert_are_adjoint_through_autograd",
           "test_gradients_of_rows_are_adjoint_through_autograd",
           "test_on_device_the_rows_that_hold_tokens_have_the_same_gradients",
           "test_one_rank_a_process_takes_and_gives_tensors", "test_results_that_get_no_gradient_count_as_zero"]
