"""Runs the works of benchmarks/peers.py in one engine, by that engine's own Python.

    python benchmarks/peer_sides.py NAME MODEL DTYPE THREADS

Prints the seconds of each work as JSON on the last line. Every engine gets the same prompts and
samples the same numbers of tokens, at temperature 1 over the whole vocabulary. Each is set up as
its users would for speed, before anything is timed, and forgets its prompts between works.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

STREAM = 96  # tokens of one stream after the first
GROUPS, SAMPLES, GROUP_PROMPT = 8, 8, 300
TURNS, GIVEN, TURN_TOKENS, OPENING = 20, 60, 8, 1000
POOL = 20_000  # tokens of KV: more than any work needs

Prompts = list[list[int]]


def ours(path: str, dtype: str, threads: int):
    """Returns this project's engine."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.engine import Bench
    from nanorchestra import load_model

    torch.set_num_threads(threads)
    model, _ = load_model(path, dtype=dtype)
    return Bench(model, room=POOL)


class Transformers:
    """`generate`, with the prompts' cache computed once and shared, and kept from turn to turn."""

    def __init__(self, path: str, dtype: str, threads: int):
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        self.torch, self.cache = torch, DynamicCache
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def generate(self, ids, cache, tokens: int):
        """Samples after ids [rows, T], of which the cache has the first. Returns all ids."""
        return self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            past_key_values=cache,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
        )

    def sample(self, prompts: Prompts, samples: int, tokens: int) -> None:
        """Samples each prompt so many times; the prompts have one length."""
        cache, ids = self.cache(config=self.model.config), self.torch.tensor(prompts)
        if samples > 1:
            with self.torch.inference_mode():
                self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(samples)
        self.generate(ids.repeat_interleave(samples, 0), cache, tokens)

    def loop(self, prompt: list[int], turns: Prompts, tokens: int) -> None:
        """Samples once after each turn's observation, keeping the KV."""
        cache, ids = self.cache(config=self.model.config), self.torch.tensor([prompt])
        for observation in turns:
            ids = self.torch.cat((ids, self.torch.tensor([observation])), 1)
            ids = self.generate(ids, cache, tokens)


class Vllm:
    """vLLM's LLM class in one process, eager, with its prefix cache."""

    def __init__(self, path: str, dtype: str, threads: int):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            path,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=4096,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, samples: int, tokens: int) -> list[int]:
        """Samples, and returns the last sample's ids."""
        params = self.params(n=samples, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return list(outputs[-1].outputs[-1].token_ids)

    def sample(self, prompts: Prompts, samples: int, tokens: int) -> None:
        """Samples each prompt so many times."""
        self.llm.reset_prefix_cache()
        self.generate(prompts, samples, tokens)

    def loop(self, prompt: list[int], turns: Prompts, tokens: int) -> None:
        """Samples once after each turn's observation; the prefix cache keeps the KV."""
        self.llm.reset_prefix_cache()
        ids = list(prompt)
        for observation in turns:
            ids += observation
            ids += self.generate([ids], 1, tokens)


class LlamaCpp:
    """llama.cpp by its C interface, one batch a step, a prompt's KV shared by its samples."""

    def __init__(self, path: str, dtype: str, threads: int):
        import llama_cpp

        self.c = c = llama_cpp
        file = write_gguf(Path(path), dtype)
        c.llama_backend_init()
        defaults = c.llama_model_default_params()
        self.llama = c.llama_model_load_from_file(str(file).encode(), defaults)
        settings = c.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = POOL, 4096, 128
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        self.context = c.llama_init_from_model(self.llama, settings)
        self.memory = c.llama_get_memory(self.context)
        self.batch = c.llama_batch_init(4096, 0, 1)
        self.samplers = []
        for seed in range(GROUPS * SAMPLES):
            chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(1.0))
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_dist(seed))
            self.samplers.append(chain)

    def decode(self, tokens: list[int], position: int, sequence: int) -> None:
        """Computes tokens of one sequence, and the logits of the last."""
        self.batch.n_tokens = 0
        for offset, token in enumerate(tokens):
            self.add(token, position + offset, sequence, offset == len(tokens) - 1)
        self.compute()

    def add(self, token: int, position: int, sequence: int, logits: bool) -> None:
        """Adds a token to the batch."""
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, logits
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens = row + 1

    def compute(self) -> None:
        """Computes the batch."""
        code = self.c.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def draw(self, sampler: int, row: int = -1) -> int:
        """Draws from the logits of a row of the batch."""
        return self.c.llama_sampler_sample(self.samplers[sampler], self.context, row)

    def sample(self, prompts: Prompts, samples: int, tokens: int) -> None:
        """Samples each prompt so many times; the prompts have one length."""
        self.c.llama_memory_clear(self.memory, False)
        newest = []
        for group, ids in enumerate(prompts):
            first = group * samples
            self.decode(ids, 0, first)
            newest += [self.draw(first + member) for member in range(samples)]
            for member in range(first + 1, first + samples):
                self.c.llama_memory_seq_cp(self.memory, first, member, -1, -1)
        for step in range(tokens - 1):
            self.batch.n_tokens = 0
            for row, token in enumerate(newest):
                self.add(token, len(prompts[0]) + step, row, True)
            self.compute()
            newest = [self.draw(row, row) for row in range(len(newest))]

    def loop(self, prompt: list[int], turns: Prompts, tokens: int) -> None:
        """Samples once after each turn's observation, keeping the KV."""
        self.c.llama_memory_clear(self.memory, False)
        pending, computed = list(prompt), 0
        for observation in turns:
            pending += observation
            for _ in range(tokens):
                self.decode(pending, computed, 0)
                computed += len(pending)
                pending = [self.draw(0)]


def write_gguf(path: Path, dtype: str) -> Path:
    """Writes the checkpoint as llama.cpp reads it: matrices in dtype, norms in float32."""
    import gguf
    from safetensors.numpy import load_file

    config, file = json.loads((path / "config.json").read_text()), path / f"{dtype}.gguf"
    kind = config["model_type"]
    writer = gguf.GGUFWriter(str(file), kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_rope_dimension_count(config["head_dim"])
    architecture = gguf.MODEL_ARCH[kind.upper()]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for part in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            to = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if kind == "llama" and ("q_proj" in name or "k_proj" in name):
                # There the two numbers that a rotation turns lie beside each other.
                halves = tensor.reshape(-1, 2, config["head_dim"] // 2, tensor.shape[-1])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            if tensor.ndim == 2 and dtype == "bfloat16":
                stored = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(to, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
            else:
                writer.add_tensor(to, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


SIDES = {"ours": ours, "llama.cpp": LlamaCpp, "vLLM": Vllm, "transformers": Transformers}


def measure(side, vocab_size: int) -> dict[str, float]:
    """Does every work twice, the first time to warm up. Returns the seconds of the second."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    seconds = {}
    for _ in range(2):
        works = {}
        for length in (300, 1500):
            works[f"first_{length}"] = (side.sample, [ids(length)], 1, 1)
            works[f"stream_{length}"] = (side.sample, [ids(length)], 1, 1 + STREAM)
        for tokens in (24, 64):
            prompts = [ids(GROUP_PROMPT) for _ in range(GROUPS)]
            works[f"groups_{tokens}"] = (side.sample, prompts, SAMPLES, tokens)
        works["loop"] = (side.loop, ids(OPENING), [ids(GIVEN) for _ in range(TURNS)], TURN_TOKENS)
        for name, (function, *arguments) in works.items():
            start = time.perf_counter()
            function(*arguments)
            seconds[name] = time.perf_counter() - start
    return seconds


def main() -> int:
    """Runs one engine."""
    name, path, dtype, threads = sys.argv[1:]
    side = SIDES[name](path, dtype, int(threads))
    vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    print("\n" + json.dumps(measure(side, vocab_size)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
