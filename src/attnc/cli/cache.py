"""`attnc cache`: what is on disk."""

from __future__ import annotations

from datetime import datetime

import click


@click.group()
def cache() -> None:
    """Show or clear the disk cache of compiled kernels."""


def _cache():
    from attnc import knobs
    from attnc.runtime.cache import DiskCache, cache_directory

    return DiskCache(cache_directory(), knobs.cache_size())


@cache.command("ls")
def list_entries() -> None:
    """List the compiled kernels, the last used first."""
    from rich.console import Console
    from rich.table import Table

    disk = _cache()
    entries = disk.entries()
    table = Table(box=None, pad_edge=False)
    table.add_column("last used")
    table.add_column("size", justify="right")
    table.add_column("kernel")
    table.add_column("key")
    for entry in entries:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(used, readable(entry.size), describe(entry.record), entry.path.stem)
    console = Console()
    if entries:
        console.print(table)
    total = sum(entry.size for entry in entries)
    console.print(f"{len(entries)} entries, {readable(total)} of {readable(disk.limit)}, in {disk.directory}", highlight=False)


@cache.command()
def clear() -> None:
    """Remove all compiled kernels from the disk."""
    disk = _cache()
    count, size = disk.clear()
    click.echo(f"removed {count} entries, {readable(size)}, from {disk.directory}")


def describe(record: dict | None) -> str:
    """One line on what an entry holds."""
    if record is None:
        return "damaged: it will be rebuilt"
    if "hash" in record:
        return "(hash of attnc's sources)"
    arguments = record.get("arguments", [])
    parts = [
        f"{argument.get('name') or argument.get('role')}: {argument['dtype']}[{argument.get('sizes', '').replace('x', ', ')}]"
        if argument.get("kind") == "buffer"
        else f"{argument.get('name') or argument.get('role')}"
        for argument in arguments
        if argument.get("role") in ("query", "capture", "number", "lse", "max", "")
    ]
    return f"{record.get('name', '?')}({', '.join(parts)})" if parts else str(record.get("name", "?"))


def readable(size: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
