"""bench/adam: variants of an optimizer step, the exact result they are compared with, the roof, the printed table."""
