"""Tests, what they share (`support`), and programs that measure (`benchmarks`)."""
