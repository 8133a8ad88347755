"""Whole tensors of sharded ones: read, set and loaded."""
