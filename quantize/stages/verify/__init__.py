"""The stage verify: compares the checkpoint on disk with the plan and the source."""
