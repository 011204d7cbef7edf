"""The model's text stack: its passes, its cache of keys and values, and what enters its products."""
