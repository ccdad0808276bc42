"""The disk cache: whole entries or none, from many processes, in damaged, full, read-only and foreign directories."""

from __future__ import annotations

import errno
import gc
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from attnc import knobs, programs
from attnc.errors import CacheWarning, KnobError
from attnc.runtime import cache as cache_module
from attnc.runtime.cache import DiskCache, Entry, disk_cache, make_key, source_hash
from attnc.target import Target

ENTRY = Entry({"name": "attention", "arguments": []}, (b"\x7fELF" + bytes(range(256)), b"", b"x" * 1000))


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 1 << 20)


def test_round_trip(cache: DiskCache):
    assert cache.get("a") is None
    cache.put("a", ENTRY)
    assert cache.get("a") == ENTRY
    assert cache.get("b") is None
    assert stat.S_IMODE(os.stat(cache.directory).st_mode) == 0o700


def test_another_instance_reads_it(cache: DiskCache):
    cache.put("a", ENTRY)
    assert DiskCache(cache.directory, 1 << 20).get("a") == ENTRY


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "magic"])
def test_damaged_entry_is_removed(cache: DiskCache, damage: str):
    cache.put("a", ENTRY)
    path = cache.directory / "a.attnc"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    elif damage == "longer":
        data += b"\0"
    else:
        data[0] ^= 1
    path.write_bytes(bytes(data))
    assert cache.get("a") is None
    assert not path.exists()
    cache.put("a", ENTRY)
    assert cache.get("a") == ENTRY


def test_size_is_bounded_and_the_last_used_stay(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", 10_000)
    for number in range(20):
        cache.put(str(number), Entry({}, (b"x" * 1000,)))
        os.utime(cache.directory / f"{number}.attnc", (number, number))
        if number > 4:
            cache.get("3")  # used again and again
    kept = {listed.path.stem for listed in cache.entries()}
    assert sum(listed.size for listed in cache.entries()) <= 10_000
    assert "3" in kept and "19" in kept and "0" not in kept


def test_an_entry_beyond_the_bound_is_not_kept(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", 100)
    cache.put("a", ENTRY)
    assert cache.get("a") is None and cache.entries() == []


def test_clear(cache: DiskCache):
    cache.put("a", ENTRY)
    cache.put("b", ENTRY)
    (cache.directory / "new-left.tmp").write_bytes(b"half")
    count, size = cache.clear()
    assert count == 2 and size > 2000
    assert list(cache.directory.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_does_not_take_it_warns_once(cache: DiskCache, monkeypatch: pytest.MonkeyPatch, code: int):
    cache.put("a", ENTRY)

    def refuse(*_args, **_keywords):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_module.tempfile, "mkstemp", refuse)
    with pytest.warns(CacheWarning, match="cannot write"):
        cache.put("b", ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("c", ENTRY)
        assert cache.get("a") == ENTRY
        assert cache.get("c") is None


def test_full_disk_leaves_no_half_entry(tmp_path: Path):
    program = f"""
import resource, signal, warnings
from pathlib import Path
from attnc.runtime.cache import DiskCache, Entry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
cache = DiskCache(Path({str(tmp_path / "cache")!r}), 1 << 20)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache.put("a", Entry({{}}, (b"x" * 5000,)))
    cache.put("b", Entry({{}}, (b"x" * 5000,)))
assert len(caught) == 1, caught
assert cache.get("a") is None
assert list(cache.directory.iterdir()) == []
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("place", ["/proc/attnc", "/dev/null", "/dev/null/attnc"])
def test_a_directory_that_cannot_be(place: str):
    cache = DiskCache(Path(place), 1 << 20)
    with pytest.warns(CacheWarning):
        cache.put("a", ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("a") is None


def test_a_directory_that_others_may_write_is_not_used(cache: DiskCache):
    cache.put("a", ENTRY)
    cache.directory.chmod(0o777)
    with pytest.warns(CacheWarning, match="others may write"):
        assert DiskCache(cache.directory, 1 << 20).get("a") is None


def test_a_directory_of_another_user_is_not_used(cache: DiskCache, monkeypatch: pytest.MonkeyPatch):
    cache.put("a", ENTRY)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.warns(CacheWarning, match="another user"):
        assert DiskCache(cache.directory, 1 << 20).get("a") is None


USE = """
import sys, warnings
import torch, attnc
from attnc import programs
query = torch.randn(1, 2, 9, 16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for factor in (1.0, 2.0):
        out = attnc.flex_attention(query, query, query, lambda score, b, h, q, k, factor=factor: score * factor + h)
        scores = query @ query.transpose(-1, -2) / 4 * factor
        assert torch.allclose(out, scores.softmax(-1) @ query, atol=1e-5)
    attnc.flex_attention(query, query, query)
messages = [str(warning.message) for warning in caught if issubclass(warning.category, attnc.errors.CacheWarning)]
print(programs.compiled, len(messages))
"""


def use(**environment: str) -> tuple[int, int]:
    """In a new process: how many programs it compiled, how many warnings of the cache it gave."""
    result = subprocess.run(
        [sys.executable, "-c", "import attnc.errors\n" + USE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled, warned = map(int, result.stdout.split())
    return compiled, warned


def test_flex_attention_with_and_without_a_cache(tmp_path: Path):
    directory = tmp_path / "cache"
    assert use(ATTNC_CACHE_DIR=str(directory)) == (2, 0)
    assert use(ATTNC_CACHE_DIR=str(directory)) == (0, 0)
    assert use(ATTNC_CACHE_DIR=str(directory), ATTNC_CACHE="off") == (2, 0)
    assert use(ATTNC_CACHE_DIR=str(directory), ATTNC_TILE_ROWS="24") == (2, 0)
    for path in directory.iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert use(ATTNC_CACHE_DIR=str(directory)) == (2, 0)
    assert use(ATTNC_CACHE_DIR=str(directory)) == (0, 0)
    assert use(ATTNC_CACHE_DIR="/proc/attnc") == (2, 1)
    directory.chmod(0o777)
    assert use(ATTNC_CACHE_DIR=str(directory)) == (2, 1)


def test_an_entry_that_does_not_link_is_rebuilt(tmp_path: Path):
    directory = tmp_path / "cache"
    assert use(ATTNC_CACHE_DIR=str(directory)) == (2, 0)
    cache = DiskCache(directory, 1 << 30)
    for listed in cache.entries():
        entry = cache.get(listed.path.stem)
        assert entry is not None
        if "arguments" in entry.record:
            cache.put(listed.path.stem, Entry(entry.record, (b"\x7fELF no object",)))
    assert use(ATTNC_CACHE_DIR=str(directory)) == (2, 0)
    assert use(ATTNC_CACHE_DIR=str(directory)) == (0, 0)


def test_many_processes(tmp_path: Path):
    program = f"""
import random, sys
from pathlib import Path
from attnc.runtime.cache import DiskCache, Entry
cache = DiskCache(Path({str(tmp_path / "cache")!r}), 40_000)
chance = random.Random(int(sys.argv[1]))
for _ in range(150):
    key = str(chance.randrange(12))
    if chance.random() < 0.5:
        cache.put(key, Entry({{"key": key}}, (key.encode() * chance.randrange(1, 5000),)))
    else:
        entry = cache.get(key)
        assert entry is None or entry.record["key"] == key and set(entry.blobs[0].decode()) <= set(key)
"""
    workers = [subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(seed)]) for seed in range(6)]
    assert [worker.wait(60) for worker in workers] == [0] * 6


def test_knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ATTNC_CACHE_SIZE", "3M")
    cache = disk_cache()
    assert cache is not None and cache.directory == tmp_path and cache.limit == 3 << 20
    monkeypatch.setenv("ATTNC_CACHE", "off")
    assert disk_cache() is None
    monkeypatch.setenv("ATTNC_CACHE", "perhaps")
    with pytest.raises(KnobError, match="ATTNC_CACHE"):
        disk_cache()
    monkeypatch.setenv("ATTNC_THREADS", "0")
    with pytest.raises(KnobError):
        knobs.threads()
    monkeypatch.setenv("ATTNC_TILE_KEYS", str(10**20))
    with pytest.raises(KnobError):
        knobs.tile_keys()
    for bits in ("100", "x"):
        monkeypatch.setenv("ATTNC_VECTOR_BITS", bits)
        with pytest.raises(KnobError):
            knobs.vector_bits()
        with pytest.raises(KnobError):
            Target.host()


def test_key_depends_on_parts_and_knobs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNC_TILE_ROWS", raising=False)
    key = make_key("record", 1)
    assert key == make_key("record", 1) != make_key("record", 2)
    monkeypatch.setenv("ATTNC_TILE_ROWS", "24")
    assert make_key("record", 1) != key


def test_source_hash_sees_an_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "attnc" / "runtime" / "cache.py"
    source.parent.mkdir(parents=True)
    source.write_text("one = 1\n")
    other = tmp_path / "attnc" / "pass.py"
    other.write_text("two = 2\n")
    monkeypatch.setattr(cache_module, "__file__", str(source))
    hashes = []
    for text in ("two = 2\n", "two = 3\n", "two = 2\n"):
        other.write_text(text)
        source_hash.cache_clear()
        hashes.append(source_hash())
        source_hash.cache_clear()
        assert source_hash() == hashes[-1]  # now from the note in the cache
    source_hash.cache_clear()
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_as_it_was_after_compiling(on: bool):
    seen = []

    def compile_now() -> tuple[list[bytes], dict[str, Any]]:
        seen.append(gc.isenabled())
        raise KnobError("no such machine")

    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KnobError):
            programs.cached(("never compiled", on), compile_now, lambda record, objects: None)
        assert (seen, gc.isenabled()) == ([False], on)
    finally:
        (gc.enable if before else gc.disable)()
