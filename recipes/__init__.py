"""The recipes that ship with quantize: one YAML file each, read by quantize.recipe.load_recipe."""
