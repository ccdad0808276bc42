"""`attnc bench`: attnc beside its peers and the machine's limits."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import click

from attnc.errors import TorchMissingError

SUITES = ("prefill", "mods", "masks", "decode", "small", "train", "models", "compile", "memory", "all")


@click.command()
@click.option(
    "--suite", "suites", type=click.Choice(SUITES), multiple=True, help="What to run (several may be given); all if none."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all that was measured here.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the roofline here (.svg, .png or .pdf).")
@click.option("--threads", type=click.IntRange(1), help="Threads of every contender; unset: as many as torch takes.")
@click.option("--repeats", type=click.IntRange(3), default=11, show_default=True, help="Turns of each contender, at most.")
@click.option(
    "--seconds", type=float, default=1.5, show_default=True, help="What a contender may take in a row; never under 3 turns."
)
@click.option("--minutes", type=float, help="End in about this time: rows take fewer turns as it runs out.")
@click.option("--peers", help="Only these, by commas (sdpa, flex, compiled, onnxruntime, openvino, iree); '' for none.")
@click.option("--rows", "only", default="", help="Only the rows that hold this text.")
@click.option("--full", is_flag=True, help="Also the rows that take long.")
@click.option("--quick", is_flag=True, help="A few rows at tiny sizes, without bounds: does it all work?")
@click.option("--write-results", is_flag=True, help="Write bench/RESULTS.md in the current directory, with bench/results.svg.")
@click.option("--tune", is_flag=True, help="Measure nothing; search better tile sizes for this machine and store them.")
def bench(
    suites: tuple[str, ...],
    json_file: Path | None,
    plot: Path | None,
    threads: int | None,
    repeats: int,
    seconds: float,
    minutes: float | None,
    peers: str | None,
    only: str,
    full: bool,
    quick: bool,
    write_results: bool,
    tune: bool,
) -> None:
    """Measure attnc and its peers turn by turn, each in a process of its own, and the machine's limits between the turns.

    Everything is checked against f64 before it is timed. Exits with 1 where attnc itself is wrong; a bound that is missed is
    named, but changes nothing. Peers that are not installed are left out; `make bench-peers` installs them.
    """
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError("the bench measures through torch, which is not installed") from error
    if tune:
        search_tiles(full)
        return
    from attnc.bench import plot as roofline
    from attnc.bench import report, session
    from attnc.bench.peers import FILES
    from attnc.bench.run import Options

    if write_results and not Path("bench").is_dir():
        raise click.UsageError("--write-results: there is no directory 'bench' here")
    if write_results and plot is None and roofline.refusal(Path("bench/results.svg")) is None:
        plot = Path("bench/results.svg")
    if plot is not None and (word := roofline.refusal(plot)):
        raise click.UsageError(f"--plot: {word}")
    wanted = None if peers is None else tuple(filter(None, peers.split(",")))
    if unknown := set(wanted or ()) - set(FILES):
        raise click.UsageError(f"--peers: no such peer: {', '.join(sorted(unknown))}")
    names = SUITES[:-1] if not suites or "all" in suites else suites
    options = Options(threads or torch.get_num_threads(), repeats, seconds, wanted)
    if quick:
        options.turns, options.budget = 3, 0.1
    out = report.console()
    place = ""

    def say(text: str) -> None:
        nonlocal place
        status.update(text)
        row = text.split(": ")[0]
        if not out.is_terminal and row != place:
            click.echo(row, err=True)
        place = row

    for number in (signal.SIGINT, signal.SIGTERM):  # either way, what was measured so far is shown
        signal.signal(number, signal.default_int_handler)
    with out.status("") as status:
        done = session.run(
            names,
            options,
            full=full,
            quick=quick,
            only=only,
            report=say,
            seconds=None if minutes is None else 60 * minutes,
            shown=lambda suite, results: out.print(report.table(suite, results)),
        )
    for line in report.summary(done):
        out.print(line, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(done.to_json(), indent=1) + "\n")
    if plot is not None:
        roofline.draw(done.results, plot)
    if write_results:
        Path("bench/RESULTS.md").write_text(report.markdown(done, shlex.join(["attnc", *sys.argv[1:]])))
    if done.wrong:
        sys.exit(1)


def search_tiles(full: bool) -> None:
    """Search tile sizes for the usual head dims, and store what is faster than the model's."""
    from attnc import tuning

    dims, dtypes = ((64, 96, 128, 256), ("f32", "f64")) if full else ((64, 128), ("f32",))
    shapes = [tuning.ShapeClass(dim, dim, dtype, few) for dtype in dtypes for dim in dims for few in (False, True)]
    found = []
    for shape in shapes:
        name = f"head dim {shape.head_dim}, {shape.dtype}, {'few' if shape.few_queries else 'many'} queries"
        best = tuning.tune(shape, report=lambda line: click.echo(f"  {line}"))
        if best is None:
            click.echo(f"{name}: the model's sizes are as good as any")
            continue
        chunk = f" in chunks of {best.chunk}" if best.chunk else ""
        click.echo(f"{name}: {best.rows} queries × {best.keys} keys{chunk} is faster")
        found.append(best)
    if found:
        click.echo(f"stored in {tuning.store(found)}")
