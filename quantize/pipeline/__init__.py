"""The stages in order, whether results are up to date, and commands that span several stages."""
