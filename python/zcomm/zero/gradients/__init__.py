"""Gradients: from autograd to averaged fp32 shards, their norm, and ``p.grad`` of the program."""
