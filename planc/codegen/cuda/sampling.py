"""Calls that choose tokens: in go a vocabulary, a page and a bucket, out come the launches behind a step's logits.

No node of the graph stands for them: tokens are the runtime's matter, which says in a record a row what is wanted.
"""

from dataclasses import dataclass

from planc.codegen.cuda.call import Bucket, Call, Constant, Ref, cdiv, i32, kernel, power_of_two, scratch, value
from planc.plans.launches import KV
from planc.plans.sampling import RECORD, RECORDS, SAMPLED

HISTORY = "history"  # the ids of the cache's tokens, at the end of each page: what a hazard calls them
CHUNK = 2048  # logits of a program
GROUP = 64  # logits whose best is known; of so many groups the largest weights are looked at first
GROUPS = 64
_KEYS, _INDEX, _TOPS, _SUMS, _LIST = (f"sampling.{name}" for name in ("keys", "index", "tops", "sums", "list"))
_IDS = 256  # ids that a program of `remember` writes
_WORD = 4
_SUM_BITS = 62  # of a sum of weights: what 64 bits hold, less the sign and a bit to spare


@dataclass(frozen=True)
class Sampling:
    """What the launches depend on: tokens of the vocabulary, bytes and positions of a page, entries of a row of the
    page table; the name of the logits, f32 [rows, vocab], and whether they lie at a multiple of 16 bytes."""

    logits: str
    vocab: int
    page_bytes: int
    block: int
    pages: int
    wide: bool

    def calls(self, bucket: Bucket) -> tuple[Call, ...]:
        """The launches of a bucket, in order."""
        return (self._remember(bucket), self._scan(bucket), self._weigh(bucket), self._draw(bucket))

    @property
    def _chunks(self) -> int:
        return cdiv(self.vocab, CHUNK)

    @property
    def _tops(self) -> int:
        return self._chunks * (CHUNK // GROUP)

    def _scratch(self, rows: int) -> dict[str, int]:
        """Bytes by buffer; all live until the last launch."""
        words = {_KEYS: self._chunks, _INDEX: self._chunks, _TOPS: self._tops, _SUMS: 2 * self._chunks, _LIST: GROUPS}
        return {name: rows * count * _WORD for name, count in words.items()}

    @property
    def _pages(self) -> dict[str, Constant]:
        return {"BLOCK": self.block, "PAGE": self.page_bytes // _WORD}

    def _constants(self, *names: str) -> dict[str, Constant]:
        found: dict[str, Constant] = {
            "VOCAB": self.vocab,
            "RECORD": RECORD,
            "CHUNK": CHUNK,
            "CHUNKS": self._chunks,
            "CHUNKS_PAD": power_of_two(self._chunks),
            "TOPS": self._tops,
            "TOPS_PAD": max(power_of_two(self._tops), GROUPS),
            "GROUP": GROUP,
            "GROUPS": GROUPS,
            "SCALE": float(2 ** (_SUM_BITS - (self.vocab - 1).bit_length())),
        }
        return {name: found[name] for name in names}

    @property
    def _aligned(self) -> frozenset[str]:
        return frozenset({"logits_ptr"}) if self.wide else frozenset()

    def _history(self) -> Ref:
        """The first page's ids, which end the page."""
        return value(KV, self.page_bytes - self.block * _WORD)

    def _remember(self, bucket: Bucket) -> Call:
        signature = {"ids_ptr": "*i32", "slots_ptr": "*i32", "pages_ptr": "*i32", "tokens": "i32"}
        made = kernel("sampling", "remember", signature, {**self._pages, "WIDTH": _IDS}, num_warps=4)
        args = (value("ids"), value("slots"), self._history(), i32(bucket.tokens))
        return Call(made, (cdiv(bucket.tokens, _IDS), 1, 1), args, ("ids", "slots"), (HISTORY,))

    def _scan(self, bucket: Bucket) -> Call:
        pointers = ("records_ptr", "pages_ptr", "table_ptr", "keys_ptr", "index_ptr")
        signature = {"logits_ptr": "*fp32", **dict.fromkeys(pointers, "*i32"), "tops_ptr": "*fp32", "stride": "i32"}
        constants = self._constants("VOCAB", "RECORD", "CHUNK", "CHUNKS", "GROUP") | self._pages
        inputs = (value(self.logits), value(RECORDS), self._history(), value("page_table"))
        args = (*inputs, scratch(_KEYS), scratch(_INDEX), scratch(_TOPS), i32(self.pages))
        reads, writes = (self.logits, RECORDS, HISTORY, "page_table"), (self.logits, _KEYS, _INDEX, _TOPS)
        return Call(
            kernel("sampling", "scan", signature, constants, aligned=self._aligned, num_warps=8),
            (bucket.rows, self._chunks, 1),
            args,
            reads,
            writes,
            self._scratch(bucket.rows),
        )

    def _weigh(self, bucket: Bucket) -> Call:
        signature = {"logits_ptr": "*fp32", "records_ptr": "*i32", "keys_ptr": "*i32", "sums_ptr": "*i64"}
        constants = self._constants("VOCAB", "RECORD", "CHUNK", "CHUNKS", "CHUNKS_PAD", "SCALE")
        args = (value(self.logits), value(RECORDS), scratch(_KEYS), scratch(_SUMS))
        return Call(
            kernel("sampling", "weigh", signature, constants, aligned=self._aligned, num_warps=4),
            (bucket.rows, self._chunks, 1),
            args,
            (self.logits, RECORDS, _KEYS),
            (_SUMS,),
            self._scratch(bucket.rows),
        )

    def _draw(self, bucket: Bucket) -> Call:
        signature = {"logits_ptr": "*fp32", "records_ptr": "*i32", "keys_ptr": "*i32", "index_ptr": "*i32"}
        signature |= {"tops_ptr": "*fp32", "sums_ptr": "*i64", "list_ptr": "*i32", "out_ptr": "*i32"}
        names = ("VOCAB", "RECORD", "CHUNK", "CHUNKS", "CHUNKS_PAD", "TOPS", "TOPS_PAD", "GROUP", "GROUPS", "SCALE")
        buffers = (_KEYS, _INDEX, _TOPS, _SUMS, _LIST)
        args = (value(self.logits), value(RECORDS), *map(scratch, buffers), value(SAMPLED))
        return Call(
            kernel("sampling", "draw", signature, self._constants(*names), aligned=self._aligned, num_warps=16),
            (bucket.rows, 1, 1),
            args,
            (self.logits, RECORDS, *buffers[:-1]),
            (_LIST, SAMPLED),
            self._scratch(bucket.rows),
        )
