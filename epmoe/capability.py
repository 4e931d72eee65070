"""The oldest GPUs that can run the kernels, as compute capabilities (major, minor)."""

OLDEST = (7, 5)  # the plain kernels: Turing, for example a T4
FAST = (9, 0)  # the fast kernels: Hopper
