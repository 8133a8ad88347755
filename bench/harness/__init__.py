"""Parts that all benches share: starting ranks, timing variants interleaved, and describing the machine."""
