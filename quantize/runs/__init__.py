"""One run on disk: its folder, and the manifest that says what made it."""
