"""Recovery scoring: tasks, paired statistics, the release gate. Imports no other part of quantize."""
