"""One GRPO step here and in TRL's GRPOTrainer: the same model, prompts, lengths and objective.

    python benchmarks/against_trl.py [--prompts 16] [--group 8] [--length 64] [--json FILE]
    python benchmarks/against_trl.py --model 25M --rounds 1 --steps 1

TRL lives in a virtual environment of the benchmark's own (runs/trl-venv), made by the first run
from the package index; torch and transformers are this environment's. The two sides take turns,
each in processes of its own. Every process makes one step to warm up. Completions go to their full
length on both sides. TRL updates in micro-batches of each of --micro-batches, and its fastest
counts. On a shared machine, compare the CPU seconds, with --threads 1.
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
import venv
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "assets" / "nano"
HOME = ROOT / "runs" / "trl-venv"
# What importing GRPOTrainer takes, without dependencies, which would bring another torch.
PACKAGES = [
    "trl==1.16.0",
    "accelerate",
    "datasets",
    "pyarrow",
    "pandas",
    "dill",
    "multiprocess",
    "xxhash",
    "psutil",
    "python-dateutil",
    "pytz",
    "tzdata",
]


def trl_python() -> Path:
    """Returns the interpreter that has TRL, installing it first if it is missing."""
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
        site = next(HOME.glob("lib/python3*/site-packages"))
        (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if subprocess.run(
        [python, "-c", "from trl import GRPOTrainer"], capture_output=True
    ).returncode:
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True
        )
    return python


def model_25m() -> Path:
    """Writes benchmarks/engine.py's model of 28M parameters with nano's vocabulary: 25M."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.engine import SHAPES
    from nanorchestra.model.qwen3 import Qwen3
    from nanorchestra.model.saving import save_checkpoint
    from nanorchestra.model.weights import load_model

    small, tokenizer = load_model(NANO)
    eos, size = small.config.eos_token_ids, small.config.vocab_size
    model = Qwen3(replace(SHAPES["28M"], vocab_size=size, eos_token_ids=eos))
    model.init_weights(0)
    path = ROOT / "runs" / "model-25m"
    path.parent.mkdir(exist_ok=True)
    save_checkpoint(model, tokenizer, path)
    return path


def prompts_of(options) -> list[str]:
    """Returns texts of random words, about 200 ids each."""
    rng = random.Random(0)
    words = ["law", "history", "medicine", "cheap", "fast", "avoid", "large", "small", "price"]
    words += ["seconds", "expert", "records", "answer", "question", "tool", "dollars"]
    return [" ".join(rng.choice(words) for _ in range(100)) for _ in range(options.prompts)]


def reward_of(text: str) -> float:
    """Any function of the text whose values differ within a group."""
    return len(set(text)) / max(1, len(text)) + text.count("e") / 50


def memory_mb() -> float:
    """Returns the peak of resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(options) -> dict:
    """Measures the steps of this project."""
    import torch

    sys.path.insert(0, str(ROOT))
    from nanorchestra import Engine, SamplingParams, load_model
    from nanorchestra.model.native import pack
    from nanorchestra.model.qwen3 import Qwen3
    from nanorchestra.model.weights import named_hf_tensors
    from nanorchestra.training.objectives import Objective, group_advantages
    from nanorchestra.training.packing import Group, Sample
    from nanorchestra.training.trainer import Trainer, TrainerSettings

    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, device="cpu", dtype="float32")
    prompts = [tokenizer.encode(text) for text in prompts_of(options)]
    rows = options.prompts * options.group
    pages = rows * -(-(max(map(len, prompts)) + options.length) // 16) + 64
    served = Qwen3(model.config)
    pack(served)
    engine = Engine(served, tokenizer, num_pages=pages, max_running=rows)
    settings = TrainerSettings(token_budget=4096)  # as in configs/nano.toml
    trainer = Trainer(model, vocab_limit=tokenizer.vocab_size, settings=settings)
    engine.update_weights(named_hf_tensors(model))
    before, seconds, cpu, tokens = memory_mb(), [], [], 0
    for step in range(options.steps + 1):
        start, worked = time.monotonic(), time.process_time()
        done = engine.generate(
            [ids for ids in prompts for _ in range(options.group)],
            [
                SamplingParams(max_tokens=options.length, seed=step * rows + i, ignore_eos=True)
                for i in range(rows)
            ],
        )
        groups = []
        for i, prompt in enumerate(prompts):
            members = done[i * options.group : (i + 1) * options.group]
            rewards, fine = [reward_of(m.text) for m in members], [True] * len(members)
            advantages, _ = group_advantages(rewards, fine, fine, Objective(), 0.0)
            groups.append(
                Group(
                    [
                        Sample(
                            prompt + m.token_ids,
                            [False] * len(prompt) + [True] * len(m.token_ids),
                            [0.0] * len(prompt) + m.logprobs,
                            a,
                        )
                        for m, a in zip(members, advantages, strict=True)
                    ],
                    len(prompt),
                )
            )
        trainer.policy_step(groups, 1e-6, Objective())
        engine.update_weights(named_hf_tensors(model))
        seconds.append(time.monotonic() - start)
        cpu.append(time.process_time() - worked)
        tokens = sum(len(m.token_ids) for m in done)
    return {
        "seconds": seconds[1:],
        "cpu": cpu[1:],
        "peak_mb": memory_mb(),
        "before_mb": before,
        "sampled": tokens,
        "prompt_ids": sum(map(len, prompts)) * options.group,
    }


def theirs(options) -> dict:
    """Measures the steps of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows, seconds, cpu, seen = options.prompts * options.group, [], [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            seconds.append(-time.monotonic())
            cpu.append(-time.process_time())

        def on_step_end(self, *args, **kwargs):
            seconds[-1] += time.monotonic()
            cpu[-1] += time.process_time()

    def reward(completions, completion_ids, **kwargs):
        seen.append(sum(map(len, completion_ids)))
        return [reward_of(text) for text in completions]

    arguments = GRPOConfig(
        output_dir=str(HOME / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=options.micro_batches[0],
        gradient_accumulation_steps=rows // options.micro_batches[0],
        num_generations=options.group,
        max_completion_length=options.length,
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
        generation_kwargs={"min_new_tokens": options.length},
        shuffle_dataset=False,
    )
    # at least as many prompts as the steps take, for the sampler to find
    data = Dataset.from_list(
        [{"prompt": text} for text in prompts_of(options)] * (options.steps + 1)
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    before = memory_mb()
    trainer.train()
    return {
        "seconds": seconds[1:],
        "cpu": cpu[1:],
        "peak_mb": memory_mb(),
        "before_mb": before,
        "sampled": seen[-1],
        "prompt_ids": sum(len(tokenizer(text)["input_ids"]) for text in prompts_of(options))
        * options.group,
    }


def main() -> int:
    """Runs both sides in turn and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=NANO,
        help="a checkpoint that both load, or 25M: random weights with nano's tokenizer",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        default=[8, 32, 128],
        help="completions that TRL computes at once (default: 8 32 128)",
    )
    for name, value, what in (
        ("prompts", 16, "groups of a step"),
        ("group", 8, "attempts of a group"),
        ("length", 64, "ids of a completion"),
        ("steps", 4, "timed steps of a process"),
        ("rounds", 2, "processes of each side"),
        ("threads", len(os.sched_getaffinity(0)), "of torch"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: {value})")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print("RESULT " + json.dumps({"ours": ours, "theirs": theirs}[options.side](options)))
        return 0
    if str(options.model) == "25M":
        options.model = model_25m()
    rows, trl = options.prompts * options.group, trl_python()
    sizes = [size for size in options.micro_batches if rows % size == 0]
    sides = {"ours": (sys.executable, "ours", rows)}
    sides |= {f"TRL, {size} at once": (trl, "theirs", size) for size in sizes}
    runs = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, (python, side, size) in sides.items():
            chosen = ["--model", options.model, "--micro-batches", str(size), "--side", side]
            done = subprocess.run(
                [python, __file__, *sys.argv[1:], *chosen],
                capture_output=True,
                text=True,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
            result = next(
                (line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None
            )
            if result is None:
                print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                return 1
            runs[name].append(json.loads(result[7:]))
    works = {(run["sampled"], run["prompt_ids"]) for results in runs.values() for run in results}
    if len(works) > 1:
        print(f"the work differs, in (sampled, prompt ids): {works}", file=sys.stderr)
    figures = {
        side: {
            "seconds": median(s for r in results for s in r["seconds"]),
            "cpu": median(s for r in results for s in r["cpu"]),
            "peak_mb": max(r["peak_mb"] for r in results),
            "above_start_mb": max(r["peak_mb"] - r["before_mb"] for r in results),
        }
        for side, results in runs.items()
    }
    print(
        f"{options.prompts} groups of {options.group}, {options.length} sampled ids each, "
        f"{options.threads} threads; load of the machine {os.getloadavg()[0]:.1f}"
    )
    widths = {"seconds": 10, "cpu": 10, "peak_mb": 10, "above_start_mb": 20}
    print(f"{'':18}{'s/step':>10}{'CPU s':>10}{'peak MB':>10}{'above the start MB':>20}")
    for name, row in figures.items():
        places = {"seconds": 2, "cpu": 2}
        shown = (f"{row[key]:>{width}.{places.get(key, 0)}f}" for key, width in widths.items())
        print(f"{name:18}{''.join(shown)}")
    best = min((name for name in figures if name != "ours"), key=lambda n: figures[n]["seconds"])
    ratios = (f"{figures[best][key] / figures['ours'][key]:>{w}.1f}" for key, w in widths.items())
    print(f"{'TRL at best / ours':18}{''.join(ratios)}")
    if options.json:
        sys.path.insert(0, str(ROOT))
        from benchmarks.engine import cpu_name

        machine = {
            "machine": cpu_name(),
            "threads": options.threads,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "trl": PACKAGES[0].partition("==")[2],
            "date": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(
            json.dumps(machine | {"figures": figures, "runs": runs}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
