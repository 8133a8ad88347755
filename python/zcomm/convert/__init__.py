"""Checkpoints of DeepSpeed as zcomm's, and the other way round: without a model, without ranks, and without DeepSpeed.

DeepSpeed's files are pickles; ``deepspeed_files`` opens them without running code of a file's choice.
"""
