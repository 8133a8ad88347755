"""Weights that are gathered in blocks of rows; see ops.py."""
