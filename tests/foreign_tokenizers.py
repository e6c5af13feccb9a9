"""Small tokenizers of the kinds that other models have, in directories as the hub has them.

The published ones differ in how they split text, in whether a whole word of the vocabulary is taken
before merges, in the token that begins a text, and in where the added tokens lie.
"""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3_TOKENS = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The cheapest expert answers the question.\n\nIt's 12 cents, they'll say: 東京, naïve, {}.\r\n"
    "user assistant system 12345 the  answer <|im_start|> and </tool_call>\n"
] * 4

TEXTS = [  # that two tokenizers have to cut alike
    *CORPUS[:1],
    "a cheapestexpert, the cheapest expert",
    "In 1969, 3.14159 and 0x1F: 12345678 apples, ½ + ⅔ = ٣٤٥ Ⅷ ²",
    "  leading, trailing \n\n\n\ttabs\r\n  and    gaps ",
    "don't I'LL we've it's 's 'S THEY'RE",
    "naïve café e\u0301, 東京タワー, Привет мир, שלום, 👩‍👩‍👧 emoji\u200d!",
    "<|im_end|><|im_start|>system <tool_call> </think> [PAD] <|eot_id|>",
    "a_b-c/d\\e: {x: [1, 2]}; $9.99 ^~|<>+= `code` -- ... ?!",
    "".join(map(chr, range(1, 0x250))),
]


def make_foreign(kind: str, directory: Path, template: str | None = None) -> Path:
    """Writes a tokenizer of a kind, such as "llama3", and returns its directory."""
    backend, config = _KINDS[kind]()
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template is not None:
        config["chat_template"] = template
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _trained(pre_tokenizer, special_tokens=()) -> Tokenizer:
    """Returns a BPE of 400 ids; the special tokens are the first of its vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(alphabet),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _split(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _llama3():
    """Llama 3: words of the vocabulary are taken whole, and <|begin_of_text|> begins a text."""
    backend = _trained(_split(LLAMA3_SPLIT))
    state = json.loads(backend.to_str())
    state["model"]["ignore_merges"] = True
    vocab = state["model"]["vocab"]
    vocab["Ġcheapestexpert"] = len(vocab)  # no merges lead to it
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(LLAMA3_TOKENS)
    bos = LLAMA3_TOKENS[0]
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
            ),
        ]
    )
    return backend, {"bos_token": bos, "eos_token": "<|eot_id|>"}


def _qwen2():
    """Qwen2.5: tool tags that are no special tokens, NFC, and no token that begins a text."""
    backend = _trained(_split(QWEN2_SPLIT))
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(CHATML_TOKENS)
    tags = ["<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    config = {"eos_token": "<|im_end|>", "bos_token": None, "add_bos_token": False}
    return backend, config | {"pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}


def _smollm2():
    """SmolLM2: digits stand alone; the vocabulary begins with the special tokens."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Sequence([digits, byte_level])
    backend = _trained(split, [*CHATML_TOKENS, "<repo_name>"])
    return backend, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def _mistral():
    """Mistral, but byte-level: markers in brackets, here such as take spaces beside them."""
    backend, config = _llama3()
    begin, end = AddedToken("[INST]", rstrip=True), AddedToken("[/INST]", lstrip=True, rstrip=True)
    backend.add_special_tokens([begin, end, "</s>"])
    return backend, config | {"eos_token": "</s>"}


def _deepseek():
    """DeepSeek-R1's distillation of Llama: markers with wide bars, and tags of its reasoning."""
    backend, config = _llama3()
    backend.add_special_tokens(["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return backend, config | {"eos_token": "<｜end▁of▁sentence｜>"}


_KINDS = {"llama3": _llama3, "qwen2": _qwen2, "smollm2": _smollm2}
_KINDS |= {"mistral": _mistral, "deepseek": _deepseek}
KINDS = tuple(_KINDS)
