"""Converts a GGUF file, the format of llama.cpp, into a directory in Hugging Face layout.

It is converted once, into the user's cache, by the package `gguf`. llama.cpp's
`convert_hf_to_gguf.py` is what is undone here. The numbers are exact: a matrix in few bits becomes
float32.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as cuts
from torch import Tensor
from tqdm import tqdm

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_toml, replace_directory
from nanorchestra.model.checkpoint import config_from_hf, write_json, write_shards
from nanorchestra.model.rope import Llama3Scaling

FORM = 1  # of the copies in the cache; another one is converted anew
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FIELDS = {  # of config.json: keys of the metadata, behind the architecture
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
ROPE_FACTORS = "rope_freqs.weight"
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}  # all others become float32
# field: key of general.sampling, and Qwen3's value: greedily, small models repeat themselves
SAMPLING = {"temperature": ("temp", 0.6), "top_p": ("top_p", 0.95), "top_k": ("top_k", 20)}
NORMAL, USER_DEFINED, UNUSED, BYTE = 1, 4, 5, 6  # values of tokenizer.ggml.token_type
ENDS = "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>"  # of a turn, where they exist
PRE_TOKENIZERS = {
    name: kind
    for kind in read_toml(Path(__file__).with_name("pre_tokenizers.toml")).values()
    for name in kind["names"]
}


def converted(path: Path) -> Path:
    """Returns the directory of a GGUF file, which may be the first of several parts. UserError.

    A file with the same path, size and time of change is not converted again; the copy of what the
    file was before is removed. Of several processes one converts, and the others wait.
    """
    state = path.stat()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorchestra"
    copies = cache / "gguf" / path.resolve().relative_to("/")
    target = copies / f"{state.st_size}-{state.st_mtime_ns}-{FORM}"
    if target.exists():
        return target
    copies.mkdir(parents=True, exist_ok=True)
    with open(copies / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            before = [copy for copy in copies.iterdir() if copy.is_dir()]
            _convert(path, target)
            for copy in before:
                shutil.rmtree(copy, ignore_errors=True)
    return target


def _convert(path, target) -> None:
    print(f"{path}: is read, to be converted once", file=sys.stderr)
    readers = [_reader(part) for part in _parts(path)]
    metadata = {name: field.contents() for name, field in readers[0].fields.items()}
    stored = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    count = metadata.get("split.count", 1)
    require(
        len(readers) == count, f"{path}: one of {count} parts; give x-00001-of-{count:05d}.gguf"
    )
    config = _config(path, metadata, stored)
    config_from_hf(config, str(path))  # refuses what the decoder does not compute
    size = sum(_dtype(tensor).itemsize * int(tensor.n_elements) for tensor in stored.values())
    print(f"{path}: the copy of {size / 1e9:.2f} GB is {target}", file=sys.stderr)
    with replace_directory(target) as directory:
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", _generation(metadata))
        if "tokenizer.ggml.tokens" in metadata:
            _tokenizer(path, metadata).save(str(directory / "tokenizer.json"))
            write_json(directory / "tokenizer_config.json", _tokenizer_config(metadata))
        write_shards(directory, _tensors(path, config, stored))


def _parts(path) -> list[Path]:
    """Returns the files over which the tensors are spread: x-00001-of-00003.gguf and so on."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    stem, count = match.groups()
    return [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, 1 + int(count))]


def _reader(path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole GGUF file ({reason})") from None


def _tensors(path, config, stored) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as Hugging Face has them.

    The rows of a head's query and key lie in Llama's files as pairs that are turned together. Here
    the first halves of all pairs come before the second ones.
    """
    query_heads = config["num_attention_heads"]
    heads = {"q_proj": query_heads, "k_proj": config.get("num_key_value_heads", query_heads)}
    for name, tensor in tqdm(stored.items(), path.name, unit=" tensors", disable=None):
        if name == ROPE_FACTORS:
            continue
        *layer, module, kind = name.removeprefix("blk.").split(".")
        owner = f"model.layers.{layer[0]}." if layer else ""
        hf_module = MODULES[module]
        numbers = dequantize(tensor.data, tensor.tensor_type)
        projection = hf_module.rpartition(".")[2]
        if config["model_type"] == "llama" and projection in heads:
            pairs = numbers.reshape(heads[projection], -1, 2, *numbers.shape[1:])
            numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
        yield f"{owner}{hf_module}.{kind}", torch.tensor(numbers, dtype=_dtype(tensor))


def _dtype(tensor) -> torch.dtype:
    return DTYPES.get(tensor.tensor_type.name, torch.float32)


def _config(path, metadata, stored) -> dict[str, Any]:
    kind = metadata["general.architecture"]
    for name in stored.keys() - {ROPE_FACTORS}:
        module = name.split(".")[-2]
        known = f"{path}: the tensor {name!r} of a model of the kind {kind!r} is not served"
        require(module in MODULES, known)
    matrices = {_dtype(tensor) for tensor in stored.values() if len(tensor.shape) > 1}
    dtype = min(matrices, key=str) if len(matrices) == 1 else torch.float32
    config = {
        "model_type": kind,
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in stored,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    for field, key in FIELDS.items():
        if f"{kind}.{key}" in metadata:
            config[field] = metadata[f"{kind}.{key}"]
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if ROPE_FACTORS in stored:
        config["rope_scaling"] = _llama3_scaling(path, config, stored[ROPE_FACTORS].data)
    elif scaling != "none":
        numbers = {field: metadata.get(f"{kind}.rope.scaling.{key}") for field, key in YARN.items()}
        config["rope_scaling"] = {"rope_type": scaling} | numbers
    return config


def _llama3_scaling(path, config, factors) -> dict[str, Any]:
    """Returns the scaling that divides the frequencies by `factors` [D / 2], as Llama 3.1 has it.

    The file does not hold its other numbers, which are the same in all published models.
    """
    numbers = {
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = config["rope_theta"]
    pairs = torch.arange(len(factors)) / len(factors)
    frequencies = theta**-pairs
    scaled = Llama3Scaling(**numbers).scaled(frequencies, theta)
    same = np.allclose(frequencies / scaled, factors, rtol=1e-4)
    require(same, f"{path}: {ROPE_FACTORS} is not the scaling of Llama 3.1")
    return {"rope_type": "llama3"} | numbers


def _generation(metadata) -> dict[str, Any]:
    """Returns how to sample, and the ids that llama.cpp ends a turn at."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = _tokens(metadata)
    ids += [tokens.index(end) for end in ENDS if types.get(end) not in (None, NORMAL)]
    generation = {"eos_token_id": [i for i in dict.fromkeys(ids) if i is not None]}
    for field, (key, usual) in SAMPLING.items():
        generation[field] = metadata.get(f"general.sampling.{key}", usual)
    return generation | {"do_sample": True}


def _tokens(metadata) -> tuple[list[str], dict[str, int]]:
    """Returns the tokens by id, and the type of each token."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return tokens, dict(zip(tokens, types, strict=True))


def _tokenizer(path, metadata) -> Tokenizer:
    """Returns the byte-level BPE whose tokens, merges and cut the metadata has. UserError."""
    kind, name = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    require(kind == "gpt2", f"{path}: tokenizer.ggml.model = {kind!r}: expected 'gpt2'")
    known = ", ".join(PRE_TOKENIZERS)
    require(name in PRE_TOKENIZERS, f"{path}: tokenizer.ggml.pre = {name!r}: expected {known}")
    pre = PRE_TOKENIZERS[name]
    tokens, types = _tokens(metadata)
    vocab = {token: i for i, token in enumerate(tokens) if types[token] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.get("ignore_merges", False)))
    splits = [cuts.Split(Regex(pattern), "isolated") for pattern in pre["patterns"]]
    byte_level = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = cuts.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    for token, kind in types.items():
        added = [AddedToken(token, normalized=False)]
        if kind == USER_DEFINED:
            tokenizer.add_tokens(added)
        elif kind not in (NORMAL, UNUSED, BYTE):
            tokenizer.add_special_tokens(added)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre.get("add_bos")):
        text = [(tokens[bos], bos)]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{tokens[bos]} $A", f"{tokens[bos]} $A {tokens[bos]} $B", text
        )
    return tokenizer


def _tokenizer_config(metadata) -> dict[str, Any]:
    tokens, _ = _tokens(metadata)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for field, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}.items():
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if i is not None:
            config[field] = tokens[i]
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}
