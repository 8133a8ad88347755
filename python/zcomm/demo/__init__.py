"""`zcomm demo`: trains a small GPT on real text through ZeroOptimizer and shows where time and memory go."""
