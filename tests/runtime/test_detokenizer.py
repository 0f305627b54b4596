"""Text that grows: never broken, always the one-shot text in the end, cut at stop strings however it was divided."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from planc.runtime.detokenizer import MAX_HELD_TOKENS, ByteDetokenizer, StopStrings, WindowDetokenizer
from planc.runtime.tokenizer import Tokenizer
from tests.runtime.fake import tiny_tokenizer

TOKENIZER = tiny_tokenizer(300)
TEXTS = [
    "今天天气如何？",
    "ďábelské ódy",
    "客单价",
    "😀👩‍👩‍👧 family 👍🏽",
    "plain ascii, then é",
    "\n\n tabs\tand  spaces ",
    "\ufffd a real replacement character \ufffd",
]


def byte_fallback_tokenizer(strip: bool) -> Tokenizer:
    """A sentencepiece-like tokenizer: words with a leading ▁, and all 256 bytes as tokens."""
    words = ["<s>", "</s>", "<unk>", "▁Hello", "▁world", "▁", "lo", "x", "▁leading", "▁x", "<pad>"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    raw = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    raw.add_special_tokens(["<s>", "</s>", "<pad>"])
    return Tokenizer(raw, {"bos_token": "<s>"})


FALLBACK = {strip: byte_fallback_tokenizer(strip) for strip in (True, False)}


def pieces(tokenizer, ids, prompt=(), windows=False):
    detokenizer = WindowDetokenizer(tokenizer.decode, prompt) if windows else tokenizer.detokenizer(prompt)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


def test_the_decoder_chooses_the_detokenizer():
    assert isinstance(TOKENIZER.detokenizer([]), ByteDetokenizer)
    assert isinstance(FALLBACK[True].detokenizer([]), WindowDetokenizer)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_whole_characters_and_the_one_shot_text(text, windows):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    shown, rest = pieces(TOKENIZER, ids, windows=windows)
    assert "".join(shown) + rest == TOKENIZER.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)
        assert rest == ""


@given(st.lists(st.integers(0, 299), max_size=40), st.lists(st.integers(4, 299), max_size=8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_one_shot_text(ids, prompt, windows):
    """Random bytes, mostly broken UTF-8, special tokens among them."""
    shown, rest = pieces(TOKENIZER, ids, windows=windows)
    assert "".join(shown) + rest == TOKENIZER.decode(ids)
    shown, rest = pieces(TOKENIZER, ids, prompt, windows)
    before, after = TOKENIZER.decode(prompt), TOKENIZER.decode([*prompt, *ids])
    if "\ufffd" not in before:
        assert before + "".join(shown) + rest == after


@given(st.text(max_size=30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_byte_fallback_gives_the_one_shot_text(text, strip):
    tokenizer = FALLBACK[strip]
    ids = [11 + byte for byte in text.encode()]
    shown, rest = pieces(tokenizer, ids)
    assert "".join(shown) + rest == tokenizer.decode(ids)
    assert ("\ufffd" in text) or not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("strip", [True, False])
def test_spaces_as_one_shot(strip):
    """A decoder that strips the first space does so once, not at each token; special tokens vanish without a trace."""
    tokenizer = FALLBACK[strip]
    for words in (["▁Hello", "▁world"], ["▁", "▁leading", "▁x"], ["<pad>", "▁Hello", "</s>", "▁world", "</s>"]):
        ids = [tokenizer.raw.token_to_id(word) for word in words]
        shown, rest = pieces(tokenizer, ids)
        assert "".join(shown) + rest == tokenizer.decode(ids)
    hello, world = (tokenizer.raw.token_to_id(word) for word in ("▁Hello", "▁world"))
    assert "".join(pieces(tokenizer, [world], [0, hello])[0]) == " world"


@pytest.mark.parametrize("windows", [False, True])
def test_prompt_that_ends_inside_a_character_does_not_leak(windows):
    ids = TOKENIZER.encode("龘", add_special_tokens=False)
    assert len(ids) == 3
    shown, rest = pieces(TOKENIZER, [*ids[1:], *TOKENIZER.encode("ok", add_special_tokens=False)], ids[:1], windows)
    assert "".join(shown) + rest == "\ufffd\ufffdok"


def test_broken_bytes_are_held_but_not_for_ever():
    first = TOKENIZER.encode("😀", add_special_tokens=False)[0]
    detokenizer = WindowDetokenizer(TOKENIZER.decode)
    assert [detokenizer.push(first) for _ in range(MAX_HELD_TOKENS - 1)] == [""] * (MAX_HELD_TOKENS - 1)
    assert detokenizer.push(first) == "\ufffd" * MAX_HELD_TOKENS
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "\ufffd"


def test_skipped_special_tokens_cost_nothing():
    detokenizer = WindowDetokenizer(TOKENIZER.decode)
    assert not any(detokenizer.push(1) for _ in range(1000))
    assert len(detokenizer._ids) <= MAX_HELD_TOKENS
    assert detokenizer.push(TOKENIZER.encode("x", add_special_tokens=False)[0]) == "x"


# ---- stop strings


def cut(text, stops, keep=False):
    """The rule itself, on the whole text: the match that ends first, then the one that starts first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, at, stop = min(found)
    return text[: end if keep else at], stop


def run_stops(parts, stops, keep=False):
    matcher = StopStrings(stops, keep=keep)
    shown = [matcher.push(part) for part in parts]
    return shown, "".join(shown) + matcher.flush(), matcher.matched


@given(
    st.text("ab\n", max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 2**12),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_division_gives_the_same_cut(text, stops, cuts, keep):
    parts, last = [], 0
    for at in range(1, len(text) + 1):
        if cuts >> at & 1 or at == len(text):
            parts.append(text[last:at])
            last = at
    _, whole, matched = run_stops(parts, stops, keep)
    assert (whole, matched) == cut(text, stops, keep)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_nothing_shown_is_ever_part_of_a_stop_and_nothing_is_held_without_need(text, stops):
    matcher, shown = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        shown += matcher.push(text[end - 1])
        if matcher.matched:
            break
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        longest = max(
            (n for n in range(end + 1) if any(s.startswith(text[end - n : end]) and len(s) > n for s in stops)),
            default=0,
        )
        assert len(held) == longest


def test_reported_stops():
    alphabet = list("ABCDEFGHIJKLMN")
    shown, whole, matched = run_stops(alphabet, ["DEFGHIJ"])
    assert (whole, matched) == ("ABC", "DEFGHIJ")
    assert shown[:3] == ["A", "B", "C"]
    assert run_stops(["Hi", "\n", "Us", "er:"], ["\nUser:", "<|im_end|>"])[1:] == ("Hi", "\nUser:")
    assert run_stops(["Hi", "\n", "Us", "ers"], ["\nUser:"])[1:] == ("Hi\nUsers", None)


def test_random_text_through_detokenizer_and_stops():
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice(["客", "单", "a", "b", "é", " "]) for _ in range(20))
        stop = text[rng.randrange(15) :][: rng.randrange(1, 4)]
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        shown, rest = pieces(TOKENIZER, ids)
        assert run_stops([*shown, rest], [stop])[1] == cut(text, [stop])[0]
