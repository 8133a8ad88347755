"""`zcomm demo`: train a small GPT on real text through ZeroOptimizer and show where time and memory go."""
