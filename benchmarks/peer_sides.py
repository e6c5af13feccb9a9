"""The works of benchmarks/peers.py inside one engine; runs in that engine's own environment.

    python benchmarks/peer_sides.py NAME MODEL DTYPE THREADS

Reads the name of a work a line, does it, and prints its seconds as a line of JSON. Every engine
gets the same prompts and samples the same numbers of tokens, at temperature 1 over the whole
vocabulary. Each is set up as its users would for speed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

DECODED, TURNS, GIVEN, TURN_TOKENS, OPENING = 96, 20, 60, 8, 1000


class Ours:
    """This project's engine."""

    def __init__(self, path: str, dtype: str, threads: int):
        import torch

        sys.path.insert(0, str(Path(__file__).parents[1]))
        from nanorchestra import Engine, SamplingParams, load_model
        from nanorchestra.model.native import pack

        torch.set_num_threads(threads)
        model, _ = load_model(path, dtype=dtype)
        pack(model)
        self.params = lambda count, seed: SamplingParams(count, ignore_eos=True, seed=seed)
        self.engine = lambda tokens: Engine(model, num_pages=tokens // 16 + 200)

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        """Samples each prompt so many times."""
        room = sum(map(len, prompts)) + len(prompts) * samples * (tokens + 32)
        params = [self.params(tokens, seed) for _ in prompts for seed in range(samples)]
        self.engine(room).generate([ids for ids in prompts for _ in range(samples)], params)

    def loop(self, prompt: list[int], turns: list[list[int]], tokens: int) -> None:
        """Samples once after each turn's given ids, keeping the KV."""
        session = self.engine(len(prompt) + sum(map(len, turns)) + tokens * len(turns)).session(
            prompt
        )
        for seed, given in enumerate(turns):
            session.append(given)
            session.sample(self.params(tokens, seed))


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

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        """Samples each prompt so many times; the prompts have one length."""
        cache, ids = self.cache(config=self.model.config), self.torch.tensor(prompts)
        if samples > 1:
            with self.torch.inference_mode():
                self.model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(samples)
        self.generate(ids.repeat_interleave(samples, 0), cache, tokens)

    def loop(self, prompt: list[int], turns: list[list[int]], tokens: int) -> None:
        """Samples once after each turn's given ids, keeping the KV."""
        cache, ids = self.cache(config=self.model.config), self.torch.tensor([prompt])
        for given in turns:
            ids = self.torch.cat((ids, self.torch.tensor([given])), 1)
            ids = self.generate(ids, cache, tokens)


class Vllm:
    """vLLM's LLM class in one process, eager, with its prefix cache."""

    def __init__(self, path: str, dtype: str, threads: int):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
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

    def run(self, prompts: list[list[int]], samples: int, tokens: int) -> list[int]:
        """Returns the last sample's ids."""
        params = self.params(n=samples, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in prompts]
        return list(self.llm.generate(prompts, params, use_tqdm=False)[-1].outputs[-1].token_ids)

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        """Samples each prompt so many times."""
        self.llm.reset_prefix_cache()
        self.run(prompts, samples, tokens)

    def loop(self, prompt: list[int], turns: list[list[int]], tokens: int) -> None:
        """Samples once after each turn's given ids; the prefix cache keeps the KV."""
        self.llm.reset_prefix_cache()
        ids = list(prompt)
        for given in turns:
            ids += given
            ids += self.run([ids], 1, tokens)


class LlamaCpp:
    """llama.cpp by its C interface, one batch a step, a prompt's KV shared by its samples."""

    def __init__(self, path: str, dtype: str, threads: int):
        import llama_cpp

        file = write_gguf(Path(path), dtype)
        self.c = c = llama_cpp
        c.llama_backend_init()
        self.llama = c.llama_model_load_from_file(
            str(file).encode(), c.llama_model_default_params()
        )
        settings = c.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = 16384, 4096, 128
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        self.context = c.llama_init_from_model(self.llama, settings)
        self.memory = c.llama_get_memory(self.context)
        self.batch = c.llama_batch_init(4096, 0, 1)
        self.samplers = []
        for seed in range(64):
            chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(1.0))
            c.llama_sampler_chain_add(chain, c.llama_sampler_init_dist(seed))
            self.samplers.append(chain)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Computes (token, position, sequence, whether its logits are wanted) of each row."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self.c.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def drawn(self, sampler: int, row: int) -> int:
        """Draws from the logits of a row of the last batch."""
        return self.c.llama_sampler_sample(self.samplers[sampler], self.context, row)

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        """Samples each prompt so many times."""
        c, length = self.c, len(prompts[0])
        c.llama_memory_clear(self.memory, False)
        count, newest = len(prompts) * samples, []
        for i, ids in enumerate(prompts):
            first = i * samples
            self.decode([(t, n, first, n == length - 1) for n, t in enumerate(ids)])
            newest += [self.drawn(first + k, length - 1) for k in range(samples)]
            for other in range(first + 1, first + samples):
                c.llama_memory_seq_cp(self.memory, first, other, -1, -1)
        for step in range(tokens - 1):
            self.decode([(newest[row], length + step, row, True) for row in range(count)])
            newest = [self.drawn(row, row) for row in range(count)]

    def loop(self, prompt: list[int], turns: list[list[int]], tokens: int) -> None:
        """Samples once after each turn's given ids, keeping the KV."""
        self.c.llama_memory_clear(self.memory, False)
        coming, place = list(prompt), 0
        for given in turns:
            coming += given
            for _ in range(tokens):
                last = len(coming) - 1
                self.decode([(t, place + n, 0, n == last) for n, t in enumerate(coming)])
                place += len(coming)
                coming = [self.drawn(0, last)]


def write_gguf(path: Path, dtype: str) -> Path:
    """Writes the checkpoint as llama.cpp reads it: matrices in dtype, norms in float32."""
    import gguf
    from safetensors.numpy import load_file

    config, file = json.loads((path / "config.json").read_text()), path / f"{dtype}.gguf"
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, path / "tokenizer.json", config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for part in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            to = names.get_name(name, try_suffixes=(".weight",))
            if tensor.ndim == 2 and dtype == "bfloat16":
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(to, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(to, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer, file: Path, config: dict) -> None:
    """Adds a byte-level BPE, which a server needs; none if the file is not there."""
    if not file.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    data = json.loads(file.read_text())
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    for token, place in (data["model"]["vocab"] | added).items():
        tokens[place] = token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in added.values() else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)


def rope_theta(config: dict) -> float:
    """Returns the base of the rotary angles, in either of the layouts of a configuration."""
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]


SIDES = {"ours": Ours, "llama.cpp": LlamaCpp, "vLLM": Vllm, "transformers": Transformers}


def work(side, name: str, ids) -> list[float]:
    """Does a work by its name, and returns the seconds of its parts."""

    def timed(function, *arguments) -> float:
        start = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - start

    kind, _, size = name.partition("_")
    if kind == "stream":  # to the first token, and DECODED tokens further
        prompts = [[ids(int(size))] for _ in range(2)]
        return [
            timed(side.sample, prompts[0], 1, 1),
            timed(side.sample, prompts[1], 1, DECODED + 1),
        ]
    if kind == "groups":
        return [timed(side.sample, [ids(300) for _ in range(8)], 8, int(size))]
    turns = [ids(GIVEN) for _ in range(TURNS)]
    return [timed(side.loop, ids(OPENING), turns, TURN_TOKENS)]


def main() -> int:
    """Answers on what was standard output; what a library prints there goes to the errors."""
    name, path, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side, rng = SIDES[name](path, dtype, int(threads)), random.Random(0)
    size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    print("[]", file=answers)
    for line in sys.stdin:
        seconds = work(side, line.strip(), lambda n: [rng.randrange(size) for _ in range(n)])
        print(json.dumps(seconds), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
