"""Activations as products read them: quantized rows with their scales."""
