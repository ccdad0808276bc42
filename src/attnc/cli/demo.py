"""`attnc demo`."""

import click


@click.command()
def demo() -> None:
    """Compile and run a handful of mods."""
