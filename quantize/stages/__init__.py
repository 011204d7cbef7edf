"""The stages of a run, each a plain function from files to files, and code that stages share."""
