"""Recipes: our own YAML files, and llm-compressor's read as ours."""
