"""The tests of test_torch_as_users_call.py, test_torch_several_layers.py and test_torch_many_steps.py with tensors that lie on a GPU."""

import pytest
import test_torch_as_users_call as of_users
import test_torch_many_steps as of_steps
import test_torch_several_layers as of_layers
from test_torch_several_layers import model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
__all__ = ["model"]

globals().update(
    {
        name: law
        for module in (of_users, of_layers, of_steps)
        for name, law in vars(module).items()
        if name.startswith("test_")
    }
)
