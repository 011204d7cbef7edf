"""Exports the same weights to other formats: GGUF for llama.cpp (docs/exports.md)."""
