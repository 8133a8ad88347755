"""Calls of ``step()``: micro-steps (micro), a step from norm to publish (step), steps that exchange moments (local)."""
