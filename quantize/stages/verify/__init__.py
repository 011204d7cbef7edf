"""The stage verify: the checkpoint on disk against the plan and its source."""
