"""A span of a file (offset and size) becomes an array that owns its bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from planc.errors import PlancError


class SpanReader:
    """An open file that is read by offset with pread, so that no mapped page counts as this process's memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as e:
            raise PlancError(f"{path} cannot be opened: {e.strerror}. Check the path and its permissions.") from None
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """u8[nbytes] from `offset`; PlancError when the file is shorter."""
        buffer = np.empty(nbytes, np.uint8)
        view = memoryview(buffer.data)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise PlancError(
                    f"{self.path} is truncated: it ends at byte {offset + done}, {offset + nbytes} were expected. "
                    "Fetch the file again."
                )
            done += count
        return buffer

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
