"""One way from a question to tokens."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlinf.config import DataConfig
from rlinf.data.row import Row
from rlinf.data.template import Renderer, messages_of
from rlinf.errors import DataError

WORDS = ["[UNK]", "<s>", "</s>", "<user>", "<gen>", "hello", "be", "brief", "x"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' and refuse %}{{ raise_exception('no system') }}"
    "{% endif %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<gen>{% endif %}"
)


def tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a word; encoding text alone puts <s> before it and </s> behind it."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(WORDS[1:5])
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="[UNK]", chat_template=chat_template
    )


def config(**settings) -> DataConfig:
    return DataConfig(kind="arithmetic", **settings)


def words(ids: list[int]) -> list[str]:
    return [WORDS[i] for i in ids]


def test_a_chat_template_that_writes_the_beginning_gives_one_and_no_end():
    assert words(Renderer(tokenizer(), config()).tokens(Row("hello", 1))) == ["<s>", "<user>", "hello", "<gen>"]


def test_plain_text_gets_what_the_tokenizer_puts_in_front_and_no_end():
    renderer = Renderer(tokenizer(), config(chat_template="plain", system="be brief"))
    assert words(renderer.tokens(Row("hello", 1))) == ["<s>", "be", "brief", "hello"]
    assert words(renderer.tokens(Row("x", 1)))[0] == "<s>"


def test_a_plain_template_that_brings_its_own_beginning_is_not_given_another():
    renderer = Renderer(tokenizer(), config(chat_template="plain", template="<s> {question}"))
    assert words(renderer.tokens(Row("hello", 1))) == ["<s>", "hello"]


def test_a_tokenizer_without_a_chat_template_is_said_once_and_only_when_not_asked_for(caplog):
    with caplog.at_level(logging.WARNING, "rlinf.data"):
        Renderer(tokenizer(None), config(chat_template="plain"))
        assert not caplog.records
        renderer = Renderer(tokenizer(None), config())
        first = [renderer.tokens(Row(q, 1)) for q in ("hello", "x")]
    assert len(caplog.records) == 1
    assert "no chat template" in caplog.text
    assert words(first[0]) == ["<s>", "hello"]


def test_system_and_template_fill_text_and_chat_questions():
    cfg = config(system="S", template="{question} {braces} {question}")
    assert messages_of(Row("{q}", 1), cfg) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "{q} {braces} {q}"},
    ]
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    filled = messages_of(Row(chat, 1), cfg)
    assert [m["content"] for m in filled] == ["own", "a", "b {braces} b"]
    assert chat[2]["content"] == "b"


def test_a_chat_template_that_refuses_is_reported_with_the_row():
    refusing = tokenizer(TEMPLATE.replace("and refuse", ""))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 3.*no system.*data\.system"):
        Renderer(refusing, config(system="be brief")).tokens(Row("x", 1, {}, "rows.jsonl, row 3"))
