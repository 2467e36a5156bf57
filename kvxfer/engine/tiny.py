"""A tiny random Llama with a real tokenizer, made offline: for tests, and for ``--model tiny``.

Decides the shape of that model. It answers with random words: it is for trying the machinery, on any laptop, without a
download. Its weights are drawn wide (``initializer_range`` 0.2), so that a wrong KV value changes the tokens.
"""

from __future__ import annotations

from pathlib import Path

from kvxfer.engine.model_files import Progress, storing

SOURCE = "tiny format 1"
SPACE_BYTES = 8 << 20
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A cache of keys and values moves from the worker that computed it "
    "to the worker that will generate from it. Hello, world! What is the capital of France? Paris is the capital. "
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9 def main(): return the answer to the user"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_model(
    path: Path | str,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    seed: int = 0,
    initializer_range: float = 0.2,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write a Hugging Face directory to ``path`` (made if missing) and return it; equal arguments give an equal model.

    ``vocab`` is at least 259: all bytes and three special tokens; the tokenizer may use fewer tokens than that.
    """
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    path = Path(path)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end_of_text,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        model_max_length=max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=wrapped.bos_token_id,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
    return path


def build(target: Path, scratch: Path, report: Progress) -> None:
    """Fill ``target`` for :func:`kvxfer.engine.model_store.resolve`."""
    report("write", 0, 1)
    with storing():
        make_tiny_model(target)
    report("write", 1, 1)
