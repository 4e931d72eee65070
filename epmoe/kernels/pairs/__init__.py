"""Kernels for pairs: dispatch sends (token, expert) pairs to the experts' owners, combine returns and sums the rows."""
