"""The stages of a run, each a plain function from files to files, and what the stages share."""
