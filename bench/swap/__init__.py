"""Parts of bench/swap_bw."""
