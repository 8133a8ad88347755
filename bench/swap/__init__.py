"""What bench/swap_bw is made of."""
