"""Ways of small batches, each a function that a kernel calls first: nothing is waited for before rows are sent."""
