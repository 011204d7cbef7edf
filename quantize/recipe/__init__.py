"""Recipes: this project's YAML files, and llm-compressor's, which are converted to them."""
