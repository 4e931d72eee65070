"""Paths for small batches, each a function that a kernel calls first. They send rows without waiting for anything."""
