"""First weights: deferred construction and the broadcast from rank 0."""
