"""Template: the one way from a question to prompt tokens.

Everything downstream takes these tokens as they are: nothing is decoded and encoded again, and the beginning-of-text
token is there once, or not at all where the tokenizer has none.
"""

from __future__ import annotations

import logging
from typing import Any

from rlinf.config import DataConfig
from rlinf.data.row import Messages, Row
from rlinf.errors import DataError

log = logging.getLogger("rlinf.data")

PLACEHOLDER = "{question}"


def messages_of(row: Row, cfg: DataConfig) -> Messages:
    """The chat: the system message (unless the row brings its own), then the question in its template.

    In a row of chat messages the template applies to the last user message.
    """
    if isinstance(row.question, str):
        chat = [{"role": "user", "content": _fill(cfg.template, row.question)}]
    else:
        chat = [dict(message) for message in row.question]
        last = max(i for i, message in enumerate(chat) if message["role"] == "user")
        chat[last]["content"] = _fill(cfg.template, chat[last]["content"])
    if cfg.system is not None and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": cfg.system})
    return chat


def _fill(template: str, question: str) -> str:
    # Not str.format: questions and templates are full of braces (LaTeX, JSON).
    return template.replace(PLACEHOLDER, question)


class Renderer:
    """Turns rows into prompt tokens with one tokenizer.

    ``chat_template="auto"`` uses the tokenizer's own chat template; a tokenizer that has none gets the messages as
    plain text, one blank line between them, which is logged once. ``"plain"`` asks for the latter.
    """

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._cfg = cfg
        self.plain = cfg.chat_template == "plain"
        if not self.plain and not getattr(tokenizer, "chat_template", None):
            log.warning(
                "the tokenizer has no chat template: prompts are plain text (data.chat_template=plain asks for that)"
            )
            self.plain = True

    def tokens(self, row: Row) -> list[int]:
        """Token ids of the prompt, up to where the response begins.

        Raises:
            DataError: the chat template refuses the messages (some know no system role).
        """
        chat = messages_of(row, self._cfg)
        if self.plain:
            return self._plain("\n\n".join(message["content"] for message in chat))
        try:
            # Chat templates write the special tokens themselves; the tokenizer adds none to their text.
            ids = self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        # Templates raise jinja2's errors and whatever their own raise_exception() throws.
        except Exception as cause:
            raise DataError(
                f"{row.where}: the tokenizer's chat template refused roles {[m['role'] for m in chat]}: {cause}; "
                "leave out data.system, or set data.chat_template=plain"
            ) from cause
        return list(ids)

    def _plain(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = self._tokenizer.bos_token_id
        # Only what the tokenizer puts in front is wanted; an end-of-text token behind the prompt would end it.
        whole = self._tokenizer(text)["input_ids"]
        if bos is not None and whole[:1] == [bos] and ids[:1] != [bos]:
            return [bos, *ids]
        return ids
