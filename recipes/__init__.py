"""The recipes that ship, a YAML file each."""
