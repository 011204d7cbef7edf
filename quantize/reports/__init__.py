"""The outputs of a run for people and CI: scores, comparisons, pages, charts, the model card."""
