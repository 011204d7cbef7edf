"""Recovery scoring: tasks, paired statistics and the release gate. Knows nothing of quantize."""
