"""Checkpoints on disk: found, read, laid out, written in shards, loaded, inspected."""
