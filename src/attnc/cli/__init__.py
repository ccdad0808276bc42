"""The command `attnc`. Each subcommand is a file of its own and imports what it needs when it runs."""

from __future__ import annotations

import sys

import click

from attnc.cli.bench import bench
from attnc.cli.cache import cache
from attnc.cli.compile import compile_command
from attnc.cli.demo import demo
from attnc.cli.doctor import doctor
from attnc.cli.opt import opt
from attnc.cli.run import run
from attnc.errors import AttncError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attnc")
def commands() -> None:
    """attnc: a compiler for attention."""


commands.add_command(opt)
commands.add_command(compile_command)
commands.add_command(run)
commands.add_command(bench)
commands.add_command(cache)
commands.add_command(demo)
commands.add_command(doctor)


def main() -> None:
    """The entry point: runs the command; an error of attnc is its message and exit code 1, never a traceback."""
    try:
        commands(prog_name="attnc")
    except AttncError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (| head): nothing to say, and nobody to say it to
        sys.exit(141)
