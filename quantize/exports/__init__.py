"""Exports a checkpoint to other formats: GGUF for llama.cpp (docs/exports.md)."""
