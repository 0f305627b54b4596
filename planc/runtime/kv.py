"""The paged KV cache's accounting: token block digests and counts go in, page numbers come out. No tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_digest(salt: bytes) -> bytes:
    """The parent of a sequence's first block. `person` keeps a salt that spells a block's digest from posing as it."""
    return hashlib.blake2b(salt, digest_size=16, person=b"planc-salt").digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block: of its parent's digest and its own token ids, so equal digests mean equal prefixes."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Pages 0..num_blocks-1, each free, cached (content kept, nobody uses it) or used by `refs` sequences.

    A cached page is given away only when no free page is left, least recently released first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = list(reversed(range(num_blocks)))  # a stack: the page used last is the warmest
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs: list[int] = [0] * num_blocks
        self._num_used = 0
        self._digest: list[bytes | None] = [None] * num_blocks
        self._page: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that at least one sequence holds."""
        return self._num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest cached prefix of `digests`, in order; takes no reference."""
        pages: list[int] = []
        for digest in digests:
            page = self._page.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody uses: acquiring them takes them out of `num_available`."""
        return sum(self._refs[page] == 0 for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each matched page."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
                self._num_used += 1
            self._refs[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages with one reference each. The caller checks `num_available` first."""
        if count > self.num_available:
            raise RuntimeError(f"kv: {count} pages asked, {self.num_available} available; check first")
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self._num_used += count
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page of one sequence, its last page first, so that prefixes outlive their tails."""
        for page in reversed(tuple(pages)):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._num_used -= 1
                self._put_back(page)
            elif self._refs[page] < 0:
                raise RuntimeError(f"kv: page {page} released more often than it was taken")

    def register(self, page: int, digest: bytes) -> None:
        """Make a full, used page findable by its digest. The first page of equal content keeps the digest."""
        if self._digest[page] is None and digest not in self._page:
            self._digest[page] = digest
            self._page[digest] = page

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable, because their content is in doubt."""
        for page in pages:
            self._drop_digest(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check_counts(self) -> None:
        """Raise RuntimeError unless free + cached + used == total. Takes the same time however many pages there are."""
        counts = (len(self._free), len(self._cached), self._num_used)
        if sum(counts) != self.num_blocks:
            raise RuntimeError(f"kv: free, cached, used pages are {counts}, expected {self.num_blocks} together")

    def check_integrity(self) -> None:
        """As `check_counts`, and look at every page: each in one place only, the digest index one-to-one."""
        self.check_counts()
        free, cached = set(self._free), set(self._cached)
        used = {page for page, refs in enumerate(self._refs) if refs > 0}
        counts = (len(self._free), len(cached), len(used))
        if counts[2] != self._num_used or len(free | cached | used) != self.num_blocks:
            raise RuntimeError(f"kv: free, cached, used pages are {counts}, expected {self.num_blocks} different ones")
        index = {page: digest for digest, page in self._page.items()}
        if index != {page: digest for page, digest in enumerate(self._digest) if digest is not None}:
            raise RuntimeError("kv: the prefix index and the pages' digests disagree")
        if cached - index.keys() or free & index.keys():
            raise RuntimeError("kv: a cached page lost its digest, or a free page kept one")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        self._drop_digest(page)
        return page

    def _put_back(self, page: int) -> None:
        if self._digest[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    def _drop_digest(self, page: int) -> None:
        digest = self._digest[page]
        if digest is not None:
            del self._page[digest]
            self._digest[page] = None
