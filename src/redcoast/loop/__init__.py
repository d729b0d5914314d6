"""`fit`, `evaluate` and `predict_examples`: the loops, what they check, and when they stop."""
