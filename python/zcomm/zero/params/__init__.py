"""Parameter stores of stages 0 to 2, and the tiers of stage 3's shards."""
