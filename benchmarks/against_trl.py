"""Measures one GRPO step here and in TRL's GRPOTrainer: same model, prompts, lengths, objective.

    python benchmarks/against_trl.py [--model nano] [--rounds 2] [--steps 4] [--json FILE]
    python benchmarks/against_trl.py --model runs/smollm2-adopted --prompts 2 --rounds 1 --steps 2

16 groups, or as many as --prompts says, of 8 completions of 64 ids on prompts of about 200, in
float32. TRL lives in a virtual environment of its own, to which this environment's torch and
transformers are visible:

    python -m venv runs/trl-venv
    runs/trl-venv/bin/pip install --no-deps trl==1.16.0 accelerate datasets pyarrow pandas
    runs/trl-venv/bin/pip install dill multiprocess xxhash psutil python-dateutil pytz tzdata

The sides take turns, each in a process of its own that makes one step to warm up. Completions go to
their full length on both sides. TRL updates in micro-batches of 8, 32 and 128 completions, as far
as they divide a step, and its fastest counts. The last line has the FLOPs of our updates, as
`costs.model_flops` counts them, as a share of what a product of matrices does. On a shared machine
compare the CPU seconds, with --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GROUP, LENGTH = 8, 64
MICRO_BATCHES = (8, 32, 128)  # of TRL
HOME = ROOT / "runs" / "trl-venv"
WORDS = "law history medicine cheap fast avoid large small price seconds expert records answer "
WORDS += "question tool dollars"


class Clock:
    """Wall and CPU seconds of each step, and the peak of memory above that before the first."""

    def __init__(self):
        self.before_mb, self.wall, self.cpu = memory_mb(), [], []

    def start(self) -> None:
        """Begins a step."""
        self.started = time.monotonic(), time.process_time()

    def stop(self) -> None:
        """Ends a step."""
        self.wall.append(time.monotonic() - self.started[0])
        self.cpu.append(time.process_time() - self.started[1])

    def figures(self, sampled: int) -> dict[str, float]:
        """Returns medians without the first step."""
        return {
            "seconds": median(self.wall[1:]),
            "cpu_seconds": median(self.cpu[1:]),
            "memory_mb": memory_mb() - self.before_mb,
            "peak_mb": memory_mb(),
            "sampled": sampled,
        }


def memory_mb() -> float:
    """Returns the peak of resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def texts(count: int) -> list[str]:
    """Returns prompts of random words, about 200 ids each."""
    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS.split()) for _ in range(100)) for _ in range(count)]


def reward_of(text: str) -> float:
    """Scores a text by any function whose values differ within a group."""
    return len(set(text)) / max(1, len(text)) + text.count("e") / 50


def ours(options: argparse.Namespace) -> dict[str, float]:
    """Measures the steps of this project."""
    import torch

    from benchmarks.gpu_parts.training import groups_of
    from nanorchestra import Engine, SamplingParams, load_model, pack
    from nanorchestra.config import GrpoSection
    from nanorchestra.model.checkpoint import named_hf_tensors
    from nanorchestra.model.qwen3 import Qwen3
    from nanorchestra.training.costs import peak_flops
    from nanorchestra.training.trainer import Trainer
    from train import policy_update

    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, device="cpu", dtype="float32")
    prompts = []
    for text in texts(options.prompts):
        prompts += [tokenizer.encode(text)] * GROUP
    served = Qwen3(model.config)
    pack(served)
    rows = len(prompts)
    pages = rows * (max(map(len, prompts)) + LENGTH) // 16 + 2 * rows
    engine = Engine(served, tokenizer, page_size=16, num_pages=pages, max_running=rows)
    # no KL term and divided advantages, as on TRL's side
    trainer = Trainer(model, vocab_limit=tokenizer.vocab_size, token_budget=4096)
    engine.update_weights(named_hf_tensors(model))
    peak = peak_flops(model.norm.device, model.norm.dtype)
    clock, sampled, shares = Clock(), 0, []
    for step in range(options.steps + 1):
        clock.start()
        seeds = range(step * rows, (step + 1) * rows)
        params = [SamplingParams(max_tokens=LENGTH, seed=seed, ignore_eos=True) for seed in seeds]
        done = engine.generate(prompts, params)
        rewards = [reward_of(completion.text) for completion in done]
        groups = groups_of(prompts, done, rewards, GROUP)
        started = time.monotonic()
        update = policy_update(trainer, groups, GrpoSection(), learning_rate=1e-6, temperature=1.0)
        shares.append(update["flops"] / (time.monotonic() - started) / peak)
        engine.update_weights(named_hf_tensors(model))
        clock.stop()
        sampled = sum(len(completion.token_ids) for completion in done)
    return clock.figures(sampled) | {"share_of_matmul": median(shares[1:])}


def theirs(options: argparse.Namespace) -> dict[str, float]:
    """Measures the steps of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    sampled = []

    class StepClock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock.start()

        def on_step_end(self, *args, **kwargs):
            clock.stop()

    def reward(completions, completion_ids, **kwargs):
        sampled.append(sum(map(len, completion_ids)))
        return [reward_of(text) for text in completions]

    arguments = GRPOConfig(
        output_dir=str(HOME / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.prompts * GROUP // options.micro_batch,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        max_steps=options.steps + 1,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon_high=0.28,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        generation_kwargs={"min_new_tokens": LENGTH},
        shuffle_dataset=False,
    )
    # At least as many prompts as the steps take, for the sampler to find.
    rows = [{"prompt": text} for text in texts(options.prompts)] * (options.steps + 1)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StepClock()],
    )
    clock = Clock()
    trainer.train()
    return clock.figures(sampled[-1])


def run_side(python: Path, options: argparse.Namespace, micro_batch: int) -> dict[str, float]:
    """Runs one side in a process of its own: TRL with this micro-batch, or with 0 this project."""
    command = [str(python), __file__, "--model", options.model, "--steps", str(options.steps)]
    command += ["--threads", str(options.threads), "--micro-batch", str(micro_batch)]
    command += ["--prompts", str(options.prompts)]
    paths = sysconfig.get_paths()["purelib"]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Runs both sides in turn and prints medians."""
    parser = argparse.ArgumentParser(prog="benchmarks/against_trl.py")
    parser.add_argument("--model", default=str(ROOT / "assets" / "nano"), help="default: nano")
    parser.add_argument("--prompts", type=int, default=16, help="groups of a step (default 16)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a process (default 4)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--micro-batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.micro_batch is not None:
        figures = theirs(options) if options.micro_batch else ours(options)
        print("\n" + json.dumps(figures), flush=True)
        return 0
    from nanorchestra import formats

    options.model = str(formats.directory_of(options.model))
    trl = HOME / "bin" / "python"
    if not trl.exists():
        print(f"{HOME} has no environment; {__file__} says how to make it", file=sys.stderr)
        return 1
    sides = {"ours": (Path(sys.executable), 0)}
    rows = options.prompts * GROUP
    for size in MICRO_BATCHES:
        if rows % size == 0:
            sides[f"TRL, {size} at once"] = (trl, size)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, (python, size) in sides.items():
            runs[name].append(run_side(python, options, size))
    figures: dict[str, Any] = {}
    for name, results in runs.items():
        assert all(result["sampled"] == rows * LENGTH for result in results), "the work differs"
        figures[name] = {key: median(result[key] for result in results) for key in results[0]}
    print(f"{'':20}{'s/step':>10}{'CPU s':>10}{'MB above the start':>20}{'MB':>10}")
    for name, row in figures.items():
        print(
            f"{name:20}{row['seconds']:10.2f}{row['cpu_seconds']:10.2f}{row['memory_mb']:20,.0f}",
            end="",
        )
        print(f"{row['peak_mb']:10,.0f}")
    best = min(figures[name]["seconds"] for name in figures if name != "ours")
    print(f"TRL at its best takes {best / figures['ours']['seconds']:.1f} times as long")
    print(f"our update reaches {figures['ours']['share_of_matmul']:.2f} of a product of matrices")
    if options.json:
        options.json.write_text(json.dumps(figures | {"threads": options.threads}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
