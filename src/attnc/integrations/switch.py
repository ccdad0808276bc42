"""Turning a replacement of torch's functions on and off: nested and concurrent uses are counted.

While one is on, torch.compile's caches on disk get a tag: what is traced then does not serve calls without the replacement,
nor in a process without attnc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch.compiler.config as compiler_config


class Switch:
    """`install` is called when the first user comes, `remove` when the last one has gone."""

    def __init__(self, name: str, install: Callable[[], None], remove: Callable[[], None]):
        self._tag = f" attnc.{name}"
        self._install = install
        self._remove = remove
        self._users = 0
        self._lock = threading.RLock()

    def on(self) -> Enabled:
        """One more user, until the returned object is closed."""
        with self._lock:
            if self._users == 0:
                self._install()
                compiler_config.cache_key_tag += self._tag
            self._users += 1
        return Enabled(self)

    def _off(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                compiler_config.cache_key_tag = compiler_config.cache_key_tag.replace(self._tag, "")
                self._remove()

    @property
    def users(self) -> int:
        return self._users


class Enabled:
    """A replacement that is on from the call that made this until `close()`, or the end of its `with` block."""

    def __init__(self, switch: Switch):
        self._switch: Switch | None = switch
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give torch's own function back, once all others are closed, too. Closing twice does nothing."""
        with self._lock:
            switch, self._switch = self._switch, None
        if switch is not None:
            switch._off()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
