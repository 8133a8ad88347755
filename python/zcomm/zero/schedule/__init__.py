"""When the update of a bucket runs, in which place, and whether a step counts: UpdateScheduler and its policies."""
