"""The collectives' bench: operations, buffers, roofs, peers, table and picture of `bench/allreduce_bw`."""
