"""The stages of a run, one plain function each from files to files, and what only they use."""
