"""The kernels of pairs: dispatch sends (token, expert) pairs to the owners of the experts, combine returns and sums them."""
