"""The stage plan: what a recipe will do to a model, and what that will cost."""
