"""Finds, reads, checks, writes, loads and inspects checkpoints on disk."""
