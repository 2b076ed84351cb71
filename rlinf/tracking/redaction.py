"""Secrets are taken out of everything that is written or sent: by the name of a key, and by the look of a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = {
    *("secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase", "passcode", "pat"),
    *("credential", "credentials", "apikey", "apikeys", "authorization", "bearer", "cookie", "cookies", "dsn"),
    *("accesskey", "secretkey", "privatekey", "accesstoken", "authtoken"),
}
_TEXT = {"key", "keys", "token", "tokens", "auth"}  # a secret where the value is not a plain number or switch
# `question_key` names a column, `pad_token` a symbol: what stands before these words says what they are.
_HARMLESS_BEFORE = {
    "key": {
        *("question", "answer", "prompt", "response", "text", "messages", "message", "label", "image", "row", "column"),
        *("field", "sort", "group", "primary", "foreign", "partition", "reward", "input", "output", "target", "data"),
        *("metric", "dict", "cache", "id", "config", "tool", "solution", "system", "content"),
    },
    "token": {
        *("pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "special", "image", "start", "end", "per", "think"),
        *("prompt", "response", "new", "next", "max", "min", "num", "extra"),
    },
}
# What follows `token` or `key` and makes of it something else: token_mean, key_column.
_HARMLESS_AFTER = {
    "token": {"mean", "level", "count", "id", "ids", "budget", "type", "limit", "length", "weight", "loss", "sum"},
    "key": {"column", "name", "names", "size", "dim", "field"},
}
_URL_USER = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)(?P<user>[^/\s?#@]+)@")
_QUERY = re.compile(r"(?P<name>[?&;](?P<key>[\w.-]+)=)(?P<value>[^&;\s#]+)")
_ASSIGNMENT = re.compile(r"^(?P<left>[+~]{0,2}(?P<key>[\w./@-]+)\s*[=:]\s*)(?P<value>\S.*)$", re.DOTALL)
_LOOKS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
    r"|(?<=Bearer )[\w.~+/=-]{8,}|(?<=Basic )[\w+/=]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)


def redact(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of a config without its secrets.

    The value of a key that names a secret (``api_key``, ``HF_TOKEN``, ``password``, ``credentials``, ...) becomes
    ``<redacted>``, whatever it holds; ``null`` stays, to show that none was set. Keys that only sound alike
    (``max_new_tokens``, ``tokens_per_micro_batch``, ``question_key``, ``pad_token``) stay. In every other text, see
    `redact_text`.
    """
    return {
        key: REDACTED if value is not None and _secret(str(key), value) else _clean(value)
        for key, value in config.items()
    }


def redact_text(text: str) -> str:
    """A text without user and password in URLs, secrets in their queries, ``key=value`` overrides of secrets, and
    tokens of known shapes."""
    assigned = _ASSIGNMENT.match(text)
    if assigned and not assigned["value"].startswith("//"):
        last = re.split(r"[./@]", assigned["key"])[-1]
        if assigned["value"] not in ("null", "None") and _secret(last, _number(assigned["value"])):
            return assigned["left"] + REDACTED
    text = _URL_USER.sub(lambda found: f"{found['scheme']}{REDACTED}@", text)
    text = _QUERY.sub(
        lambda found: found["name"] + (REDACTED if _secret(found["key"], found["value"]) else found["value"]), text
    )
    return _LOOKS.sub(REDACTED, text)


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _secret(key: str, value: Any) -> bool:
    words = [word.lower() for word in _WORDS.findall(key)]
    if _ALWAYS & set(words):
        return not isinstance(value, bool)
    if isinstance(value, bool | int | float):
        # A number under `..._tokens` is a count; one under `api_key` or `token` is a secret that reads as a number.
        plural = "tokens" in words or "keys" in words
        return not isinstance(value, bool | float) and not plural and _names_secret(words)
    return _names_secret(words)


def _names_secret(words: list[str]) -> bool:
    for at, word in enumerate(words):
        if word not in _TEXT:
            continue
        kind = word.removesuffix("s")
        before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
        if before not in _HARMLESS_BEFORE.get(kind, ()) and after not in _HARMLESS_AFTER.get(kind, ()):
            return True
    return False


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text
