"""Update rules: the arithmetic of one optimizer on a flat shard."""
