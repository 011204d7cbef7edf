"""The engine: slots that share a cache, batches, and the graphs that take their steps."""
