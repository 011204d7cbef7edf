"""`quantize recipes`: the recipes that ship."""

import click


@click.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes that ship with quantize, or print one: `quantize recipes nvfp4`."""
    from quantize.recipe.sections import load_recipe, shipped_recipes

    shipped = shipped_recipes()
    if name is not None:
        load_recipe(name)  # an unknown name is an error that lists the known ones
        click.echo(shipped[name], nl=False)
        return
    for known, text in shipped.items():
        purpose = text.splitlines()[0].lstrip("# ")
        click.echo(f"{known:14} {purpose}")
