"""Tensors that the program sees and that have no memory: weights and gradients in shards, weights in use."""
