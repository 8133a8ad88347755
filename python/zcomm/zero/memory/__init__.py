"""Bytes of an optimizer: in use (usage), of a choice (plan), and the choice that keeps memory= (limit)."""
