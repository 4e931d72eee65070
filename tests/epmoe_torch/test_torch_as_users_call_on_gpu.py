"""The tests of test_torch_as_users_call.py with tensors that lie on a GPU."""

import pytest
import test_torch_as_users_call as of_users
from test_torch_as_users_call import draw, group

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
__all__ = ["draw", "group"]

globals().update({name: law for name, law in vars(of_users).items() if name.startswith("test_")})
