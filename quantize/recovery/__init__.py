"""Recovery scoring: tasks, paired statistics and the release gate. It never imports quantize."""
