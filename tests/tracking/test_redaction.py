"""Which keys and values are secrets, and which only sound alike."""

import pytest

from rlinf.config import TrainConfig
from rlinf.tracking import REDACTED, redact, redact_text

S = "s3cr3t-value"


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "API-KEY", "apikey", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "key", "private_key"),
        *("token", "HF_TOKEN", "hf_token", "access_token", "githubToken", "auth_token", "token_secret", "tokens"),
        *("password", "passwd", "db_password", "secret", "client_secret", "credentials", "credential", "authorization"),
        *("ssh_key", "signing_key", "keys", "GITHUB_PAT", "cookie", "auth"),
    ],
)
def test_secret_keys_lose_their_value_at_any_depth(key):
    assert redact({"a": [{"b": {key: S}}]}) == {"a": [{"b": {key: REDACTED}}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tokens_per_micro_batch", 2048), ("max_new_tokens", 32), ("max_prompt_tokens", 256), ("tokens", 12)),
        *(("question_key", "question"), ("answer_key", "answer"), ("sort_key", "length"), ("token_mean", "x")),
        *(("pad_token", "<pad>"), ("eos_token", "</s>"), ("tokenizer", "gpt2"), ("tokenizer_path", "/x")),
        *(("aggregation", "token_mean"), ("keep", 2), ("monkey", "x"), ("keyboard", "x"), ("trust_remote_code", True)),
        *(("token", None), ("use_auth", True), ("token", False), ("author", "me"), ("pattern", "x"), ("path", "/pat")),
        *(("eos_token_id", 2), ("key_column", "k"), ("compat", "x")),
    ],
)
def test_keys_that_only_sound_alike_stay(key, value):
    assert redact({"a": {key: value}}) == {"a": {key: value}}


@pytest.mark.parametrize("value", [1234, ["a", "b"], {"user": "me", "value": S}, 1.5])
def test_a_secret_key_hides_whatever_it_holds(value):
    assert redact({"password": value}) == {"password": REDACTED}


def test_a_number_under_a_singular_secret_key_is_a_secret():
    assert redact({"api_key": 1234, "token": 99}) == {"api_key": REDACTED, "token": REDACTED}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"https://me:{S}@host/x", "https://<redacted>@host/x"),
        (f"https://{S}@github.com/a/b", "https://<redacted>@github.com/a/b"),
        (f"postgresql+psycopg2://u:{S}@db:5432/m", "postgresql+psycopg2://<redacted>@db:5432/m"),
        (f"http://h/p?x=1&api_key={S}&y=2", "http://h/p?x=1&api_key=<redacted>&y=2"),
        (f"http://h/p?max_new_tokens=3&token={S}", "http://h/p?max_new_tokens=3&token=<redacted>"),
        (f"+logger.wandb.api_key={S} and more", "+logger.wandb.api_key=<redacted>"),
        (f"HF_TOKEN={S}", "HF_TOKEN=<redacted>"),
        (f"Authorization: {S}", "Authorization: <redacted>"),
        ("failed with sk-abcdefghijklmnopqrstuvwx today", "failed with <redacted> today"),
        ("hf_abcdefghijklmnopqrstuv", "<redacted>"),
        ("curl -H 'Bearer abcdef123456789'", "curl -H 'Bearer <redacted>'"),
        ("https://host:8080/path@v1", "https://host:8080/path@v1"),
        ("data.question_key=problem", "data.question_key=problem"),
        ("rollout.max_new_tokens=64", "rollout.max_new_tokens=64"),
        ("a question: what is 2+2?", "a question: what is 2+2?"),
        ("me@example.com", "me@example.com"),
    ],
)
def test_texts_lose_their_secrets_and_nothing_else(text, clean):
    assert redact_text(text) == clean
    assert redact({"x": [text]}) == {"x": [clean]}


def test_nothing_of_the_projects_own_config_is_taken_for_a_secret():
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.structured(TrainConfig), throw_on_missing=False)
    assert redact(config) == config


def test_the_original_is_untouched():
    config = {"a": {"token": S}}
    redact(config)
    assert config == {"a": {"token": S}}
