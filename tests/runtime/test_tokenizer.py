"""The tokenizer folder: one BOS, every EOS, bytes of tokens, templates as transformers renders them."""

import json
import threading
import time

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from planc.errors import PlancError
from planc.runtime.errors import RequestError
from planc.runtime.template import ChatTemplate
from planc.runtime.tokenizer import Tokenizer, check_ids
from tests.runtime.fake import tiny_tokenizer


def with_bos(tokenizer: Tokenizer, **config) -> Tokenizer:
    """The same tokenizer, whose post-processor puts <s> first, as Llama's does."""
    raw = RawTokenizer.from_str(tokenizer.raw.to_str())
    raw.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>", **config}, {}, tokenizer.template_source)


def test_completions_get_one_bos_and_chats_that_of_their_template():
    plain, bos = tiny_tokenizer(300), with_bos(tiny_tokenizer(300))
    assert plain.encode("fox")[0] != 0
    assert bos.encode("fox").count(0) == 1
    assert bos.encode("<s>fox") == bos.encode("fox")
    chat = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos.special_tokens).render([{"content": "fox"}])
    assert bos.encode(chat, add_special_tokens=False) == bos.encode("fox")


def test_add_bos_token_of_the_config_wins():
    base = tiny_tokenizer(300)
    assert with_bos(base, add_bos_token=False).encode("fox") == base.encode("fox")
    assert with_bos(base, add_bos_token=False).encode("<s>fox")[0] == 0
    wanting = Tokenizer(base.raw, {"bos_token": {"content": "<s>"}, "add_bos_token": True})
    assert wanting.encode("fox") == [0, *base.encode("fox")]
    assert wanting.encode("<s>fox").count(0) == 1


def test_special_ids():
    tokenizer = tiny_tokenizer(300)
    assert tokenizer.eos_token_ids == (1, 3)
    assert tokenizer.bos_token_id == 0
    only = Tokenizer(tokenizer.raw, {"eos_token": "<|im_end|>"}, {"eos_token_id": 1, "bos_token_id": 0})
    assert (only.eos_token_ids, only.bos_token_id) == ((1, 3), 0)
    assert Tokenizer(tokenizer.raw).eos_token_ids == ()


def test_token_bytes_join_to_the_text():
    tokenizer = tiny_tokenizer(300)
    text = "naïve 客单价 😀 \n x"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_start|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(tokenizer.encode("客")[0]) == "\ufffd"


def test_token_bytes_of_byte_fallback():
    raw = RawTokenizer(models.BPE({"<0xE5>": 0, "▁a": 1, "<unk>": 2}, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(raw)
    assert [tokenizer.token_bytes(token) for token in (0, 1)] == [b"\xe5", b" a"]


def test_check_ids():
    check_ids([0, 9], 10)
    for bad in ([10], [-1]):
        with pytest.raises(RequestError, match="outside"):
            check_ids(bad, 10)


def write_folder(folder, **files):
    tiny_tokenizer(300).raw.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_load_reads_the_folder(tmp_path):
    config = {"eos_token": "</s>", "chat_template": [{"name": "default", "template": "old {{ eos_token }}"}]}
    folder = write_folder(tmp_path, tokenizer_config__json=config, generation_config__json={"temperature": 0.5})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat([]) == "old </s>"
    assert tokenizer.generation == {"temperature": 0.5}
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(folder).render_chat([]) == "new"


def test_load_names_what_is_wrong(tmp_path):
    with pytest.raises(PlancError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = write_folder(tmp_path, tokenizer_config__json="{")
    with pytest.raises(PlancError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(PlancError, match="expected a JSON object"):
        Tokenizer.load(folder)


def test_truncation_and_padding_of_the_file_are_off():
    raw = tiny_tokenizer(300).raw
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    assert len(Tokenizer(raw).encode("the quick brown fox, 客单价")) > 2


def test_no_template_is_a_400():
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tiny_tokenizer(300).raw).render_chat([])


# ---- templates


def render(source, messages=(), **variables):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages), **variables)


def test_template_extras():
    assert render("{{ messages[0] | tojson }}", [{"content": "<é&>"}]) == '{"content": "<é&>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}") == "<s>TrueTrue"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "messages"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_template_failures_are_400(source, match):
    with pytest.raises(RequestError, match=match) as refused:
        render(source)
    assert refused.value.status == 400
    assert refused.value.param == "messages"


def test_broken_template_is_the_plans_fault():
    with pytest.raises(PlancError, match="chat template"):
        render("{% if %}")


def test_encodes_like_the_library():
    raw = RawTokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(raw).encode("a b c") == [0, 1, 2]


def test_text_longer_than_the_longest_token_times_the_context_does_not_fit():
    tokenizer = tiny_tokenizer(300)
    longest = max(range(300), key=lambda i: len(tokenizer.token_text(i)))
    length = len(tokenizer.token_text(longest))
    assert length <= tokenizer.longest_token
    tokenizer.check_fits(tokenizer.token_text(longest) * 10_000, 10_000, "prompt")
    with pytest.raises(RequestError, match="maximum context length is 10 tokens") as refused:
        tokenizer.check_fits("x" * 100_000, 10, "messages")
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")


def test_no_length_is_too_long_where_an_unknown_token_swallows_words():
    raw = RawTokenizer(models.WordLevel({"<unk>": 0, "fox": 1}, unk_token="<unk>"))
    assert Tokenizer(raw).longest_token is None
    Tokenizer(raw).check_fits("x" * 100_000, 1, "prompt")
    fused = RawTokenizer(models.BPE({"<unk>": 0, "x": 1}, [], unk_token="<unk>", fuse_unk=True))
    assert Tokenizer(fused).longest_token is None
    spelt = RawTokenizer(models.BPE({"<unk>": 0, "x": 1}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    assert Tokenizer(spelt).longest_token == 5


def test_a_long_text_is_encoded_alike_and_lets_other_threads_run():
    tokenizer = with_bos(tiny_tokenizer(300))
    text = "naïve fox, 今天 " * 12_000
    found = []
    worker = threading.Thread(target=lambda: found.extend(tokenizer.encode(text)))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20
    assert found == tokenizer.raw.encode(text).ids
