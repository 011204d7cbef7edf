"""Runs the stages in order, tells which results are stale, and has commands that span stages."""
