"""`attnc cache`: what is on disk."""

from __future__ import annotations

import textwrap
from datetime import datetime

import click

KERNEL_WIDTH = 80 - len("2026-01-01 00:00  123.4 KiB  01234567  ")


@click.group()
def cache() -> None:
    """Show or clear the disk cache of compiled kernels."""


def _cache():
    from attnc import knobs
    from attnc.runtime.cache import DiskCache, cache_directory

    return DiskCache(cache_directory(), knobs.cache_size())


@cache.command("ls")
@click.option("--limit", "-n", type=click.IntRange(min=0), default=20, show_default=True, help="List at most so many.")
def list_entries(limit: int) -> None:
    """List the compiled kernels, the last used first."""
    disk = _cache()
    found = disk.entries()
    entries = [entry for entry in found if entry.record is None or "hash" not in entry.record]
    for entry in entries[:limit]:
        used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
        what = textwrap.shorten(describe(entry.record), KERNEL_WIDTH, placeholder=" …")
        click.echo(f"{used}  {readable(entry.size):>9}  {entry.path.stem[:8]}  {what}")
    more = len(entries) - limit
    if more > 0:
        click.echo(f"… and {more} more (--limit {len(entries)} lists all)")
    total = readable(sum(entry.size for entry in found))
    click.echo(f"{len(entries)} entries, {total} of {readable(disk.limit)}, in {disk.directory}")


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
    if record.get("name") == "leaves" and "arguments" not in record:
        return "shared routines"
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
