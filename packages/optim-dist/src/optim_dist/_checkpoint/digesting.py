"""A file that is written, hashed and flushed to the disk at the same time, by three threads.

    caller   copies what it is given into chunks, and writes each full chunk into the file
    digest   hashes chunks in order, from the memory that they are written from, so that load finds what the disk, or
             the way there, has changed
    disk     flushes what is written so far, again and again, so that little is left to flush at the end

Lower bound: the time of the slowest of the three; one after the other, they would take the sum. Chunks are reused in
turn, so that the caller is ahead of the digest by ``NUM_CHUNKS`` at most, whatever the size of the file. A file smaller
than a chunk starts no thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import IO

CHUNK = 2**20  # bytes: large for a system call; all chunks together stay in the cache of a core
NUM_CHUNKS = 8


class DigestingStream:
    """Writes into an open file; ``finish`` flushes it to the disk, and returns size and SHA-256. A context manager.

    Threads end with the context, however it ends.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._chunk, self._fill = bytearray(), 0
        self._num_bytes = 0
        self._num_lent = 0
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._full: SimpleQueue[bytearray | None] = SimpleQueue()
        self._has_more, self._is_over = Event(), False
        self._threads: list[Thread] = []
        self._error: OSError | None = None

    def __enter__(self) -> DigestingStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_threads()

    def write(self, data: bytes | memoryview) -> int:
        """Copy ``data``, which the caller may change afterwards; returns its number of bytes."""
        view = memoryview(data).cast("B")
        place = 0
        while place < len(view):
            if self._fill == len(self._chunk):
                self._pass_on()
            count = min(len(self._chunk) - self._fill, len(view) - place)
            self._chunk[self._fill : self._fill + count] = view[place : place + count]
            self._fill += count
            place += count
        return len(view)

    def flush(self) -> None:
        """Do nothing: ``finish`` writes the chunk that is not full."""

    def finish(self) -> tuple[int, str]:
        """Flush everything to the disk; return the file's size and digest.

        Raises:
            OSError: the error of any flush, also an earlier one: the system reports it only once.
        """
        last = memoryview(self._chunk)[: self._fill]
        self._num_bytes += self._fill
        self._file.write(last)
        self._end_threads()
        self._digest.update(last)
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._num_bytes, self._digest.hexdigest()

    def _pass_on(self) -> None:
        """Write the full chunk, hand it to the digest, and take a free one."""
        if self._chunk:
            if self._error is not None:
                raise self._error
            if not self._threads:
                self._start(self._hash, self._sync)
            self._full.put(self._chunk)
            self._file.write(self._chunk)
            self._num_bytes += len(self._chunk)
            self._has_more.set()
        if self._num_lent < NUM_CHUNKS:
            self._num_lent += 1
            self._free.put(bytearray(CHUNK))
        self._chunk, self._fill = self._free.get(), 0

    def _start(self, *each: Callable[[], None]) -> None:
        for target in each:
            thread = Thread(target=target, name=f"checkpoint{target.__name__}")
            thread.start()
            self._threads.append(thread)

    def _hash(self) -> None:
        while (chunk := self._full.get()) is not None:
            self._digest.update(chunk)
            self._free.put(chunk)

    def _sync(self) -> None:
        while self._error is None:
            self._has_more.wait()
            self._has_more.clear()
            if self._is_over:
                return
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._error = error

    def _end_threads(self) -> None:
        self._is_over = True
        self._has_more.set()
        self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
