"""Experiments and the bundled model's trainer: not installed, and nothing installed imports them."""
