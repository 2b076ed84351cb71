"""A Llama of 1.3M parameters and a byte tokenizer, both made here: for tests and for trying a workflow in seconds.

The weights are random, but for one thing. A uniform policy over 264 tokens almost never says a number or stops, so it
would never be rewarded; the last feature of the embedding is therefore a constant, and the output layer reads from it
a prior over tokens: mostly digits, and the end.
"""

from __future__ import annotations

from pathlib import Path

FORMAT = 1  # raise when `build` writes something else than before
SEED = 20240229
SPECIAL = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DIGIT_LOGIT, EOS_LOGIT = 4.0, 5.5  # over other tokens; about 60% of samples are digits, 25% the end


def cache_name() -> str:
    return f"tiny-f{FORMAT}"


def build(directory: Path) -> None:
    """Write the model, its tokenizer and its generation config into ``directory``."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # tensor parallelism of 2 splits no KV head
        head_dim=64,  # a size that CPU attention kernels of inference engines support
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.0625,  # 1 / sqrt(hidden)
        dtype="float32",
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    digits = tokenizer.encode("0123456789", add_special_tokens=False)
    _give_prior(model, {**dict.fromkeys(digits, DIGIT_LOGIT), tokenizer.eos_token_id: EOS_LOGIT})
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def byte_tokenizer():  # type: ignore[no-untyped-def]  # tokenizers is imported lazily
    """One token a byte: any text has an encoding that decodes to itself, and a digit is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _give_prior(model, logits: dict[int, float]) -> None:  # type: ignore[no-untyped-def]
    import torch

    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        size = embedding.shape[1]
        # All layers add to this constant; nothing else writes to it, so that it stays about 8 of the final norm.
        constant = size - 1
        embedding[:, constant] = 8.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[constant] = 0
            layer.mlp.down_proj.weight[constant] = 0
            layer.self_attn.q_proj.weight[:, constant] = 0
            layer.self_attn.k_proj.weight[:, constant] = 0
        head[:, constant] = 0
        hidden = model.model(input_ids=torch.arange(embedding.shape[0])[None]).last_hidden_state
        seen = hidden[..., constant].mean()
        for token, logit in logits.items():
            head[token, constant] = logit / seen
