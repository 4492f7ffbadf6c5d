"""`dpro recipe`: commands for `dpro watch --on-finding` that take a host out of a job."""

from __future__ import annotations

import click

from dpro.errors import UsageError


@click.command()
@click.argument("name", required=False)
def recipe(name: str | None) -> None:
    """Commands that take a host out of a job, for `dpro watch --on-finding`.

    \b
    dpro recipe                     which there are
    dpro recipe slurm               print one: what it does, and its settings
    dpro watch RUN --on-finding "$(dpro recipe slurm)"
    dpro recipe slurm > out.sh      to change it; then --on-finding 'sh out.sh'
    """
    recipes = _recipes()
    if name is None:
        for title, text in recipes.items():
            click.echo(f"{title:<12} {text.splitlines()[0].lstrip('# ')}")
    elif name in recipes:
        click.echo(recipes[name], nl=False)
    else:
        raise UsageError(f"no recipe {name!r}: there are {', '.join(recipes)}")


def _recipes() -> dict[str, str]:
    """The text of each recipe, by name."""
    from importlib.resources import files

    folder = files("dpro.watch").joinpath("recipes")
    scripts = {file.name.removesuffix(".sh"): file for file in folder.iterdir() if file.name.endswith(".sh")}
    return {name: scripts[name].read_text(encoding="utf-8") for name in sorted(scripts)}
