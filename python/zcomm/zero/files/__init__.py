"""Files that checkpoints and loaded weights consist of: safetensors, folders, and writing that survives a kill."""
