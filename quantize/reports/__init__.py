"""What people and CI read of a run: scores, comparisons, pages, charts, the model card."""
