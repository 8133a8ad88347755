"""When and in which place the update of a bucket runs, and whether a step counts: UpdateScheduler and its policies."""
