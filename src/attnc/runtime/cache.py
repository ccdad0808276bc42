"""The disk cache of compiled kernels: plain files, one an entry, safe with many processes.

An entry is a file `<key>.attnc` that is written beside its place and renamed into it, and holds a checksum of itself; a damaged
one is removed and rebuilt. Where the directory cannot be used (read-only, full, not ours alone), one `CacheWarning` says so and
everything works without it. The checksum finds damage; it is no proof of origin: entries are native code, so the directory must
belong to the user and be writable by nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnc import knobs
from attnc.errors import CacheWarning

SUFFIX = ".attnc"
_MAGIC = b"attnc cache entry 1\n"
_LENGTHS = struct.Struct("<QQ")
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """What is kept under a key: a JSON record and any number of byte strings (objects)."""

    record: dict[str, Any]
    blobs: tuple[bytes, ...]


@dataclass(frozen=True)
class Listed:
    """One line of `attnc cache ls`: when it was used last (seconds since 1970), its size in bytes and its record."""

    path: Path
    used: float
    size: int
    record: dict[str, Any] | None


class DiskCache:
    """A directory of entries, at most `limit` bytes in all; the ones not used for longest go first."""

    def __init__(self, directory: Path, limit: int):
        self.directory = directory
        self.limit = limit
        self._lock = threading.Lock()
        self._trusted: bool | None = None
        self._warned = False

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None where there is none (or only a damaged one, which is removed)."""
        if not self._is_trusted():
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot read {path}: {error.strerror or error}")
            return None
        entry = _decode(data)
        try:
            if entry is None:
                path.unlink(missing_ok=True)
            else:
                os.utime(path)
        except OSError:
            pass  # read-only: it cannot be marked as used, nor removed
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep `entry` under `key`; another process that does the same at the same time does no harm."""
        if not self._is_trusted(create=True):
            return
        name = None
        try:
            data = _encode(entry)
            if len(data) > self.limit:
                return
            handle, name = tempfile.mkstemp(prefix="new-", suffix=".tmp", dir=self.directory)
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(name, self._path(key))
            name = None
            self._shrink()
        except OSError as error:
            self._warn(f"cannot write to {self.directory}: {error.strerror or error}")
        finally:
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    def remove(self, key: str) -> None:
        """Forget `key`: its entry turned out to be of no use."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def file(self, name: str, create: bool = False) -> Path | None:
        """A file beside the entries, which no sweep removes; None where the directory cannot be used."""
        return self.directory / name if self._is_trusted(create) else None

    def entries(self) -> list[Listed]:
        """All entries, the last used first; a damaged one has no record."""
        found = []
        for path, status in self._files():
            try:
                entry = _decode(path.read_bytes())
            except OSError:
                continue
            found.append(Listed(path, status.st_mtime, status.st_size, entry.record if entry else None))
        return sorted(found, key=lambda listed: -listed.used)

    def clear(self) -> tuple[int, int]:
        """Remove all entries; returns how many and how many bytes."""
        count = size = 0
        for path, status in self._files():
            try:
                path.unlink()
            except OSError:
                continue
            count, size = count + 1, size + status.st_size
        self._remove_stale(0.0)
        return count, size

    def _path(self, key: str) -> Path:
        return self.directory / (key + SUFFIX)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            with os.scandir(self.directory) as scan:
                for item in scan:
                    if item.name.endswith(SUFFIX):
                        try:
                            yield Path(item.path), item.stat(follow_symlinks=False)
                        except OSError:
                            continue  # another process removed it
        except OSError:
            return

    def _shrink(self) -> None:
        """Remove what has not been used for longest until the rest is within the limit."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime)
        total = sum(status.st_size for _, status in files)
        if total <= self.limit:
            return
        for path, status in files:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue
            total -= status.st_size
            if total <= self.limit * 3 // 4:  # some room, so that not every entry to come pays for a sweep
                break
        self._remove_stale(_STALE_SECONDS)

    def _remove_stale(self, age: float) -> None:
        """Remove what processes that were killed left half-written."""
        for path in self.directory.glob("new-*.tmp"):
            try:
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()
            except OSError:
                continue

    def _is_trusted(self, create: bool = False) -> bool:
        """Whether the directory is there (or can be made), belongs to us, and nobody else may write to it."""
        with self._lock:
            if self._trusted is None:
                try:
                    status = os.stat(self.directory)
                except FileNotFoundError:
                    if not create:
                        return False  # nothing to read; it is made when there is something to keep
                    status = self._create()
                except OSError as error:
                    self._warn(f"cannot use {self.directory}: {error.strerror or error}")
                    status = None
                self._trusted = status is not None and self._check(status)
            return self._trusted

    def _create(self) -> os.stat_result | None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.stat(self.directory)
        except OSError as error:
            self._warn(f"cannot create {self.directory}: {error.strerror or error}")
            return None

    def _check(self, status: os.stat_result) -> bool:
        if not stat.S_ISDIR(status.st_mode):
            self._warn(f"{self.directory} is no directory")
        elif hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            self._warn(f"{self.directory} belongs to another user")
        elif os.name == "posix" and status.st_mode & 0o022:
            self._warn(f"others may write to {self.directory} (chmod go-w it)")
        else:
            return True
        return False

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"attnc's disk cache is not used: {reason}. Set ATTNC_CACHE_DIR to another directory, or ATTNC_CACHE=off."
            warnings.warn(text, CacheWarning, stacklevel=2)


def disk_cache() -> DiskCache | None:
    """The cache that the knobs ask for; None where it is off."""
    if not knobs.cache():
        return None
    return _disk_cache(cache_directory(), knobs.cache_size())


@functools.cache
def _disk_cache(directory: Path, limit: int) -> DiskCache:
    return DiskCache(directory, limit)


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held a cache's lock.
    os.register_at_fork(after_in_child=_disk_cache.cache_clear)


def cache_directory() -> Path:
    """`ATTNC_CACHE_DIR`, else the place the system keeps caches of users."""
    directory = knobs.cache_dir()
    if directory is None:
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("attnc", appauthor=False))
        if not directory.is_absolute():  # a user without a home
            directory = Path(tempfile.gettempdir()) / f"attnc-{os.geteuid() if hasattr(os, 'geteuid') else 'cache'}"
    return directory


def make_key(*parts: object) -> str:
    """A key of all that a compiled kernel depends on: `parts`, attnc's version and sources, LLVM, and the knobs that compile.

    Each part's `repr` must say all there is to it.
    """
    text = "\n".join(map(repr, (source_hash(), _llvm_version(), knobs.compile_key(), *parts)))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.cache
def _llvm_version() -> tuple[Any, ...]:
    import llvmlite
    import llvmlite.binding as llvm

    return (llvmlite.__version__, *llvm.llvm_version_info)


@functools.cache
def source_hash() -> str:
    """A hash of attnc's own sources. What files there are, of which size and time, is hashed first; the hash of the contents is
    kept under that in the cache directory, so that a usual start reads no sources."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(_sources(str(root)))
    listing = hashlib.sha256(repr(files).encode()).hexdigest()[:40]
    cache = disk_cache()
    note = f"sources-{listing}"
    if cache is not None and (entry := cache.get(note)) is not None:
        return str(entry.record["hash"])
    digest = hashlib.sha256()
    for name, *_ in files:
        contents = Path(name).read_bytes()
        digest.update(f"{os.path.relpath(name, root)} {len(contents)}\n".encode())
        digest.update(contents)
    if cache is not None:
        cache.put(note, Entry({"hash": digest.hexdigest()}, ()))
    return digest.hexdigest()


def _sources(directory: str) -> Iterator[tuple[str, int, int, int]]:
    """(path, size, time of change, inode) of each source file below `directory`."""
    with os.scandir(directory) as scan:
        for item in scan:
            if item.name.endswith(".py"):
                status = item.stat()
                yield item.path, status.st_size, max(status.st_mtime_ns, status.st_ctime_ns), status.st_ino
            elif item.is_dir() and item.name != "__pycache__":
                yield from _sources(item.path)


def _encode(entry: Entry) -> bytes:
    record = json.dumps(entry.record).encode()
    parts = [_LENGTHS.pack(len(record), len(entry.blobs)), record]
    for blob in entry.blobs:
        parts += [_LENGTHS.pack(len(blob), 0), blob]
    body = b"".join(parts)
    return b"".join([_MAGIC, hashlib.sha256(body).digest(), body])


def _decode(data: bytes) -> Entry | None:
    """The entry, or None where the data is not exactly what was written."""
    start = len(_MAGIC) + 32
    body = memoryview(data)[start:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    try:
        size, count = _LENGTHS.unpack_from(body, 0)
        place = _LENGTHS.size
        record = json.loads(bytes(body[place : place + size]))
        place += size
        blobs: list[bytes] = []
        for _ in range(count):
            size, _ = _LENGTHS.unpack_from(body, place)
            place += _LENGTHS.size
            blobs.append(bytes(body[place : place + size]))
            place += size
    except (ValueError, struct.error):
        return None
    return Entry(record, tuple(blobs))


def total_size(entries: Sequence[Listed]) -> int:
    """Bytes of all `entries`."""
    return sum(entry.size for entry in entries)
