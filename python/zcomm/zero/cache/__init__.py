"""Bytes between one drive and a few windows of host memory. Nothing here knows the meaning of a tensor."""
