"""Samples by difficulty: a sampler that follows a schedule, its index files, an analyzer that writes them."""
