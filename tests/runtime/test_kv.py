"""The block pool: counts that always add up, prefixes that are found, the oldest given away first."""

import random

import pytest

from planc.runtime.kv import BlockPool, block_digest, root_digest


def chain(tokens: list[int], size: int) -> list[bytes]:
    digests = [b""]
    for at in range(0, len(tokens) - size + 1, size):
        digests.append(block_digest(digests[-1], tokens[at : at + size]))
    return digests[1:]


def test_digest_tells_prefixes_apart():
    assert block_digest(b"", [1, 2]) != block_digest(b"", [2, 1])
    assert block_digest(b"a", [1]) != block_digest(b"b", [1])
    assert chain([1, 2, 3, 4], 2)[1] != chain([9, 2, 3, 4], 2)[1]
    assert chain([1, 2, 3, 4], 2) == chain([1, 2, 3, 4, 5], 2)


def test_match_is_the_longest_prefix():
    pool, digests = BlockPool(4, 2), chain([1, 2, 3, 4, 5, 6], 2)
    pages = pool.allocate(3)
    for page, digest in zip(pages, digests, strict=True):
        pool.register(page, digest)
    assert pool.match(digests) == pages
    assert pool.match(chain([1, 2, 3, 9], 2)) == pages[:1]
    assert pool.match(chain([3, 4], 2)) == []


def test_released_pages_stay_findable_until_needed_oldest_tail_first():
    pool, digests = BlockPool(3, 2), chain([1, 2, 3, 4], 2)
    pages = pool.allocate(2)
    for page, digest in zip(pages, digests, strict=True):
        pool.register(page, digest)
    pool.release(pages)
    assert pool.num_available == 3
    assert pool.match(digests) == pages
    pool.allocate(1)  # takes the page that holds nothing
    assert pool.match(digests) == pages
    pool.allocate(1)  # takes the tail of the prefix, not its head
    assert pool.match(digests) == pages[:1]
    pool.check_integrity()


def test_acquired_cached_page_is_not_given_away():
    pool = BlockPool(2, 2)
    (page,) = pool.allocate(1)
    pool.register(page, b"x")
    pool.release([page])
    assert pool.num_idle([page]) == 1
    pool.acquire(pool.match([b"x"]))
    assert pool.num_idle([page]) == 0
    assert pool.num_available == 1
    assert pool.allocate(1) != [page]
    with pytest.raises(RuntimeError, match="0 available"):
        pool.allocate(1)


def test_shared_page_is_free_after_its_last_user():
    pool = BlockPool(1, 2)
    pages = pool.allocate(1)
    pool.acquire(pages)
    pool.release(pages)
    assert pool.num_used == 1
    pool.release(pages)
    assert pool.num_used == 0
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(pages)


def test_forget_makes_cached_pages_free():
    pool = BlockPool(2, 2)
    pages = pool.allocate(2)
    pool.register(pages[0], b"x")
    pool.register(pages[1], b"y")
    pool.release(pages[:1])
    pool.forget(pages)
    assert pool.match([b"x"]) == pool.match([b"y"]) == []
    pool.release(pages[1:])
    pool.check_integrity()
    assert pool.num_available == 2


def test_a_salt_cannot_pose_as_a_block():
    block = block_digest(root_digest(b""), [1, 2])
    assert root_digest(block) != block
    assert block_digest(root_digest(block), [3, 4]) != block_digest(block, [3, 4])
    assert root_digest(b"") != root_digest(b"a")


@pytest.mark.parametrize("damage", ["leak", "double"])
def test_counts_alone_show_a_lost_or_doubled_page(damage):
    pool = BlockPool(4, 2)
    pool.allocate(2)
    pool.check_counts()
    if damage == "leak":
        pool._free.pop()
    else:
        pool._free.append(0)
    with pytest.raises(RuntimeError, match="expected 4 together"):
        pool.check_counts()


@pytest.mark.parametrize("damage", ["leak", "double", "digest"])
def test_integrity_check_can_fail(damage):
    pool = BlockPool(4, 2)
    page = pool.allocate(1)[0]
    pool.register(page, b"x")
    pool.check_integrity()
    if damage == "leak":
        pool._refs[page] = 0
    elif damage == "double":
        pool._free.append(page)
    else:
        pool._digest[page] = b"z"
    with pytest.raises(RuntimeError):
        pool.check_integrity()


def test_random_use_keeps_the_books():
    rng = random.Random(0)
    pool = BlockPool(23, 2)
    held: list[list[int]] = []
    for _ in range(4000):
        digests = chain([rng.randrange(3) for _ in range(2 * rng.randrange(1, 6))], 2)
        hits = pool.match(digests)
        need = len(digests) - len(hits)
        if rng.random() < 0.5 and need <= pool.num_available - pool.num_idle(hits):
            pool.acquire(hits)
            pages = hits + pool.allocate(need)
            for page, digest in zip(pages, digests, strict=True):
                pool.register(page, digest)
            held.append(pages)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check_integrity()
        assert pool.num_used == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    pool.check_integrity()
    assert pool.num_available == 23
