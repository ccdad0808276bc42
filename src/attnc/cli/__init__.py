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


COMMANDS = {
    opt: "Run passes on MLIR text and print the result.",
    compile_command: "Print a program as kernels, LLVM text or assembly.",
    run: "Run a function of MLIR text on arrays.",
    bench: "Measure attnc and its peers turn by turn.",
    cache: "Show or clear the disk cache of compiled kernels.",
    demo: "Run a handful of mods, beside f64 and torch.",
    doctor: "Show the machine as attnc sees it, and test it.",
}
"""Each command, and its line in the list; its own help says more."""

for command, line in COMMANDS.items():
    command.short_help = line
    commands.add_command(command)


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
