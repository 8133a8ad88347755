"""Updates that run elsewhere than in ``step()``, on a device or behind a forward; and steps that can be undone."""
