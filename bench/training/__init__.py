"""One step of training a GPT, by zcomm and by its peers, on the same data from the same weights."""
