"""Token choice, in Triton: in go logits and a record a row, out comes its token, as runtime/sampler.py would choose it.

`remember` keeps each token's id in its page of the cache, `scan` applies penalties and edits and finds the best of each
CHUNK, `weigh` sums the weights of rows that draw, `draw` chooses. Weights are exp of what is below the best, at most 1;
sums are of whole numbers, so that no order of additions matters and a row's token is a matter of the row alone.
"""

import triton
import triton.language as tl

# Places of a record, in words; plans/sampling.py has the same.
_KIND = tl.constexpr(0)
_SEQUENCE = tl.constexpr(1)
_LENGTH = tl.constexpr(2)
_PROMPT = tl.constexpr(3)
_EDITS = tl.constexpr(4)
_TOP_K = tl.constexpr(5)
_REPETITION = tl.constexpr(6)
_PRESENCE = tl.constexpr(7)
_FREQUENCY = tl.constexpr(8)
_TEMPERATURE = tl.constexpr(9)
_MIN_P = tl.constexpr(10)
_TOP_P = tl.constexpr(12)
_UNIFORM = tl.constexpr(14)
_LIST = tl.constexpr(16)

_DRAWN = tl.constexpr(2)
_FIRST = tl.constexpr(-2147483648)
_LAST = tl.constexpr(2147483647)
_NAN = tl.constexpr(2147483647)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the weight of the best


@triton.jit
def remember(ids_ptr, slots_ptr, pages_ptr, tokens, BLOCK: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the ids of a step's tokens to their slots: BLOCK places a page, pages PAGE words apart."""
    token = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    there = (token < tokens) & (slot >= 0)
    at = (slot // BLOCK).to(tl.int64) * PAGE + slot % BLOCK
    tl.store(pages_ptr + at, tl.load(ids_ptr + token, mask=there, other=0), mask=there)


@triton.jit
def _number(record_ptr, place):
    return tl.load(record_ptr + place).to(tl.float32, bitcast=True)


@triton.jit
def _share(record_ptr, place):
    """A share of 2^64, low word first."""
    low = tl.load(record_ptr + place).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(record_ptr + place + 1).to(tl.int64) << 32) | low


@triton.jit
def _key(x):
    """Integers in the order of floats; a NaN is above every number. -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, _NAN, key)


@triton.jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _counts(pages_ptr, table_ptr, first, last, start, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """How often each of the CHUNK tokens from `start` on is at the positions first to last - 1 of a sequence."""
    found = tl.zeros((CHUNK,), tl.int32)
    for at in range(first, last, CHUNK):
        position = at + tl.arange(0, CHUNK)
        there = position < last
        page = tl.load(table_ptr + position // BLOCK, mask=there, other=0).to(tl.int64)
        token = tl.load(pages_ptr + page * PAGE + position % BLOCK, mask=there, other=-1) - start
        mine = there & (token >= 0) & (token < CHUNK)
        found += tl.histogram(tl.where(mine, token, 0), CHUNK, mask=mine)
    return found


@triton.jit
def scan(
    logits_ptr,
    records_ptr,
    pages_ptr,
    table_ptr,
    keys_ptr,
    index_ptr,
    tops_ptr,
    stride,
    VOCAB: tl.constexpr,
    RECORD: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The key and index of a chunk's best, of equals the first; of a row that draws, the best of each GROUP too.

    Penalties, biases and masks change the logits in place; no row whose logits are wanted has any.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    record_ptr = records_ptr + row * RECORD
    kind = tl.load(record_ptr + _KIND)
    if kind == 0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCAB
    x_ptr = logits_ptr + row.to(tl.int64) * VOCAB + token
    x = tl.load(x_ptr, mask=inside, other=float("-inf"))
    repetition, presence = _number(record_ptr, _REPETITION), _number(record_ptr, _PRESENCE)
    frequency, edits = _number(record_ptr, _FREQUENCY), tl.load(record_ptr + _EDITS)
    length, first = tl.load(record_ptr + _LENGTH), tl.load(record_ptr + _PROMPT)
    sequence_ptr = table_ptr + tl.load(record_ptr + _SEQUENCE).to(tl.int64) * stride
    repeats, appears = repetition != 1.0, (presence != 0.0) | (frequency != 0.0)
    for side in range(0, 2):  # of prompt and output, then of the output alone
        if (repeats & (side == 0)) | (appears & (side == 1)):
            start = tl.where(side == 0, 0, first)
            seen = _counts(pages_ptr, sequence_ptr, start, length, chunk * CHUNK, CHUNK, BLOCK, PAGE)
            repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
            y = tl.where(side == 0, repeated, x - tl.fma(frequency, seen.to(tl.float32), presence))
            x = tl.where(seen > 0, y, x)
    for j in range(0, edits):
        mine = token == tl.load(record_ptr + _LIST + 2 * j)
        added = _number(record_ptr, _LIST + 2 * j + 1)
        x = tl.where(mine, tl.where(added == float("-inf"), added, x + added), x)
    if repeats | appears | (edits > 0):
        tl.store(x_ptr, x, mask=inside)
    key = tl.where(inside, _key(x), _FIRST)
    best = tl.max(key, axis=0)
    out = row * CHUNKS + chunk
    tl.store(keys_ptr + out, best)
    tl.store(index_ptr + out, tl.min(tl.where(key == best, token, _LAST), axis=0))
    if kind == _DRAWN:
        tops = tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), axis=1)
        tl.store(tops_ptr + out * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP), tops)


@triton.jit
def _weights(x, best, inverse, least):
    """exp((x - best) * inverse), and 0 for what is below `least`."""
    w = tl.exp((x - best) * inverse)
    return tl.where(w < least, 0.0, w)


@triton.jit
def _mass(w, SCALE: tl.constexpr):
    return (w * SCALE).to(tl.int64)


@triton.jit
def _best(keys_ptr, row, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PAD)
    keys = tl.load(keys_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=_FIRST)
    return tl.max(keys, axis=0), keys


@triton.jit
def weigh(
    logits_ptr,
    records_ptr,
    keys_ptr,
    sums_ptr,
    VOCAB: tl.constexpr,
    RECORD: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sum of a chunk's weights, in units of 1 / SCALE; nothing for a row that does not draw."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    record_ptr = records_ptr + row * RECORD
    if tl.load(record_ptr + _KIND) != _DRAWN:
        return
    top, _ = _best(keys_ptr, row, CHUNKS, CHUNKS_PAD)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    w = _weights(x, _value(top), 1.0 / _number(record_ptr, _TEMPERATURE), _number(record_ptr, _MIN_P))
    tl.store(sums_ptr + row * CHUNKS + chunk, tl.sum(_mass(w, SCALE), axis=0))


@triton.jit
def _tile(row_ptr, list_ptr, groups, at, VOCAB: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Tokens [GROUPS, GROUP] and their logits: the row's from the group `at` on, or the list's where `groups` is 0."""
    n = tl.arange(0, GROUPS)
    group = tl.where(groups > 0, at + n, tl.load(list_ptr + n))
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return token, tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf"))


@triton.jit
def _tally(
    row_ptr,
    list_ptr,
    listed,
    masses,
    groups,
    best,
    inverse,
    least,
    bits,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """How many weights have at least these bits, and their sum: of the list's, or of all the row's `groups`."""
    reached = (listed >= bits) & (groups == 0)
    count, mass = reached.to(tl.int32), tl.where(reached, masses, 0)
    for at in range(0, groups, GROUPS):
        _, x = _tile(row_ptr, list_ptr, groups, at, VOCAB, GROUP, GROUPS)
        w = _weights(x, best, inverse, least)
        reached = w.to(tl.int32, bitcast=True) >= bits
        count += reached.to(tl.int32)
        mass += tl.where(reached, _mass(w, SCALE), 0)
    return tl.sum(tl.sum(count, axis=1), axis=0), tl.sum(tl.sum(mass, axis=1), axis=0)


@triton.jit
def _nth(
    row_ptr,
    list_ptr,
    groups,
    best,
    inverse,
    least,
    bits,
    nth,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The token of the n-th weight of these bits, in the list or in the row."""
    found, before = nth * 0 - 1, nth * 0
    for at in range(0, tl.maximum(groups, GROUPS), GROUPS):
        token, x = _tile(row_ptr, list_ptr, groups, at, VOCAB, GROUP, GROUPS)
        equal = (_weights(x, best, inverse, least).to(tl.int32, bitcast=True) == bits).to(tl.int32)
        counts = tl.sum(equal, axis=1)
        rank = before + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(equal, axis=1) - 1
        mine = tl.where((equal > 0) & (rank == nth), token, -1)
        found = tl.maximum(found, tl.max(tl.max(mine, axis=1), axis=0))
        before += tl.sum(counts, axis=0)
    return found


@triton.jit
def _listed(
    tops_ptr,
    list_ptr,
    best,
    inverse,
    least,
    TOPS: tl.constexpr,
    TOPS_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Lists the GROUPS groups of the largest weights, ascending; the bits of the largest weight outside of them."""
    group = tl.arange(0, TOPS_PAD)
    top = tl.load(tops_ptr + group, mask=group < TOPS, other=float("-inf"))
    bits = _weights(top, best, inverse, least).to(tl.int32, bitcast=True)
    low, high = tl.min(bits, axis=0) * 0, tl.max(bits, axis=0) * 0 + _ONE
    while low < high:
        middle = high - (high - low) // 2
        reached = tl.sum((bits >= middle).to(tl.int32), axis=0) >= GROUPS
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    above, equal = bits > low, bits == low
    room = GROUPS - tl.sum(above.to(tl.int32), axis=0)
    listed = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
    place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + place, group, mask=listed)
    return tl.max(tl.where(listed, 0, bits), axis=0)


@triton.jit
def _filtered(
    row_ptr,
    record_ptr,
    tops_ptr,
    list_ptr,
    best,
    inverse,
    least,
    total,
    VOCAB: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """A token of the top_k largest weights, of those the first that hold top_p, at a share of their sum; all in falling
    order, of equals the first.

    Three searches, each for the largest bits at which the weights from there up reach a count or a sum: that of top_k,
    of top_p, and of the share. They look at the groups of the list, and where those do not hold enough, at the row.
    """
    top_k, top_p = tl.load(record_ptr + _TOP_K), _share(record_ptr, _TOP_P)
    floor = _listed(tops_ptr, list_ptr, best, inverse, least, TOPS, TOPS_PAD, GROUPS)
    tl.debug_barrier()
    groups, low, nth = floor * 0, floor + 1, floor * 0
    _, x = _tile(row_ptr, list_ptr, groups, 0, VOCAB, GROUP, GROUPS)
    w = _weights(x, best, inverse, least)
    listed, masses = w.to(tl.int32, bitcast=True), _mass(w, SCALE)
    stage = tl.where(top_k > 0, 0, tl.where(top_p != 0, 1, 2))
    while stage < 3:
        target = tl.umulhi(_share(record_ptr, _UNIFORM), total)
        count_needed = tl.where(stage == 0, top_k, 0)
        mass_needed = tl.where(stage == 0, 0, tl.where(stage == 1, tl.umulhi(top_p, total), target + 1))
        found, high, above, mass_above = low - 1, low * 0 + _ONE, low * 0, total * 0
        while found < high:
            middle = high - (high - found) // 2
            count, mass = _tally(
                row_ptr, list_ptr, listed, masses, groups, best, inverse, least, middle, VOCAB, GROUP, GROUPS, SCALE
            )
            reached = (count >= count_needed) & (mass >= mass_needed)
            found = tl.where(reached, middle, found)
            high = tl.where(reached, high, middle - 1)
            above = tl.where(reached, above, count)
            mass_above = tl.where(reached, mass_above, mass)
        if (found < low) & (floor > 0):
            groups, low, floor = groups * 0 + TOPS, low * 0 + 1, floor * 0
        else:
            each = tl.where(found < low, 0, _mass(found.to(tl.float32, bitcast=True), SCALE))
            of_count = mass_above + (top_k - above) * each
            each = tl.maximum(each, 1)
            of_mass = mass_above + tl.maximum((mass_needed - mass_above + each - 1) // each, 1) * each
            nth = ((target - mass_above) // each).to(tl.int32)
            total = tl.where(stage == 0, of_count, of_mass)
            low = tl.maximum(found, low)
            stage = tl.where((stage == 0) & (top_p == 0), 2, stage + 1)
    return _nth(row_ptr, list_ptr, groups, best, inverse, least, low, nth, VOCAB, GROUP, GROUPS)


@triton.jit
def _unfiltered(
    row_ptr,
    sums,
    target,
    best,
    inverse,
    least,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The first token at which the running sum of all weights passes the target: by chunk, then inside of it."""
    upto = tl.cumsum(sums, axis=0)
    chunk = tl.sum((upto <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(tl.arange(0, CHUNKS_PAD) < chunk, sums, 0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf"))
    inside = tl.cumsum(_mass(_weights(x, best, inverse, least), SCALE), axis=0)
    rest = tl.minimum(target - before, tl.max(inside, axis=0) - 1)
    return chunk * CHUNK + tl.sum((inside <= rest).to(tl.int32), axis=0)


@triton.jit
def draw(
    logits_ptr,
    records_ptr,
    keys_ptr,
    index_ptr,
    tops_ptr,
    sums_ptr,
    list_ptr,
    out_ptr,
    VOCAB: tl.constexpr,
    RECORD: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """A row's token and the bits of its best logit, which is not finite where none can be chosen."""
    row = tl.program_id(0)
    record_ptr = records_ptr + row * RECORD
    kind = tl.load(record_ptr + _KIND)
    if kind == 0:
        return
    top, keys = _best(keys_ptr, row, CHUNKS, CHUNKS_PAD)
    chunk = tl.arange(0, CHUNKS_PAD)
    index = tl.load(index_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=_LAST)
    token = tl.min(tl.where(keys == top, index, _LAST), axis=0)
    best = _value(top)
    if (kind == _DRAWN) & (tl.abs(best) < float("inf")):
        row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
        inverse, least = 1.0 / _number(record_ptr, _TEMPERATURE), _number(record_ptr, _MIN_P)
        sums = tl.load(sums_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
        total = tl.sum(sums, axis=0)
        if (tl.load(record_ptr + _TOP_K) > 0) | (_share(record_ptr, _TOP_P) != 0):
            token = _filtered(
                row_ptr, record_ptr, tops_ptr + row.to(tl.int64) * TOPS, list_ptr + row * GROUPS, best, inverse,
                least, total, VOCAB, TOPS, TOPS_PAD, GROUP, GROUPS, SCALE,
            )  # fmt: skip
        else:
            target = tl.umulhi(_share(record_ptr, _UNIFORM), total)
            token = _unfiltered(row_ptr, sums, target, best, inverse, least, VOCAB, CHUNK, CHUNKS, CHUNKS_PAD, SCALE)
    tl.store(out_ptr + 2 * row, token)
    tl.store(out_ptr + 2 * row + 1, best.to(tl.int32, bitcast=True))
