"""Other formats, from the same weights: GGUF for llama.cpp (docs/exports.md)."""
