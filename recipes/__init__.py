"""The recipes that ship with quantize: one YAML file each, read by `load_recipe`."""
