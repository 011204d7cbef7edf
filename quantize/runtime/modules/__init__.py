"""The engine over transformers' modules: the reference on every device, and the CPU's path."""
