"""Groups of ranks that divide or copy a model: their communicators, which sums are encoded, and copies' checks."""
