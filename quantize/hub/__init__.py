"""Releases on the Hugging Face Hub: what may be published, and how it is published."""
