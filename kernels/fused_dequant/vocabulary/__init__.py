"""Products with the embedding matrix: logits, and the soft embedding of probabilities."""
