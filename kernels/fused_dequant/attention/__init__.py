"""Attention over cached positions, and the heads' norms and rope before it."""
