"""The `zcomm` command."""
