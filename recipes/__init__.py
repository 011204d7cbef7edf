"""The recipes that ship with quantize, one YAML file each: read them with quantize.recipe.load_recipe."""
