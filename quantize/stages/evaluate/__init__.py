"""The stage evaluate: baseline and candidates answer the same questions."""
