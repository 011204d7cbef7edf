"""How the bundled model was made: its shape, problems, tokenizer, training and score."""
