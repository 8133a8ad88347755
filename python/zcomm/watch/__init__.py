"""Watching a job from outside: each rank writes a small page, ``zcomm top`` and the report of a run read it.

Imports neither torch nor the core. Ranks write by ``rank``; ``jobs`` reads the pages of a user's jobs.
"""
