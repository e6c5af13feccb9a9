"""The core alone: a model is made, generates, and takes three steps of GRPO in a world of its own.

test_core.py runs it with all that is around the core shut.
"""

from dataclasses import replace

import torch

from nanorchestra import Engine, SamplingParams, chat
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import GrpoSection, RolloutSection
from nanorchestra.model.checkpoint import PRESETS, named_hf_tensors
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.records import Price, Task
from nanorchestra.training.grpo import as_group, group_advantages
from nanorchestra.training.trainer import Trainer, UpdateMetrics

STEPS, TASKS, GROUP = 3, 2, 8
SETTINGS = RolloutSection(turns=2, turn_tokens=32, context_tokens=1024)


def environment(number):
    """A sum. Short answers, which alone are in reach of random weights, are the better ones."""
    task = Task(f"train-{number}", f"What is {number} plus {number + 1}?")
    return ToolEnvironment(task, [], lambda answer: 1 / (1 + len(answer)))


def update(trainer, groups, learning_rate):
    """Makes one optimizer step, of an update whose ratio is 1; returns its metrics."""
    sums = UpdateMetrics(sum(sample.loss_ids for group in groups for sample in group.samples))
    for batch in trainer.micro_batches(groups):
        logprobs, entropy, _ = trainer.logprobs(batch)
        losses = -batch.advantages * (logprobs - logprobs.detach()).exp()
        (losses.sum() / sums.loss_ids).backward()
        sums.add(loss=losses, entropy=entropy)
        sums.add_mismatch(batch.sampler_logprobs, logprobs)
    return sums.read(trainer.ranks) | trainer.optimizer_step(learning_rate, finite=True)


def main():
    """Generates, then trains; prints a line of each step."""
    tokenizer = train_bpe(["What is 1 plus 2?"], 512)
    ids = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": tuple(tokenizer.eos_ids)}
    shape = replace(PRESETS["nano"], hidden_size=64, num_hidden_layers=2, **ids)
    trained, sampling = Qwen3(shape), Qwen3(shape)
    trained.init_weights(0)
    engine = Engine(sampling, tokenizer)
    engine.update_weights(named_hf_tensors(trained))
    prompt = chat.encode(tokenizer, [{"role": "user", "content": "What is 1 plus 2?"}], tools=None)
    (done,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, seed=0))
    assert len(done.token_ids) == len(done.logprobs) > 0

    def params(seed, budget):
        return SamplingParams(budget, seed=seed)

    player = Rollout(engine, tokenizer, params, SETTINGS, Price(0.0, 0.0))
    trainer = Trainer(trained, vocab_limit=tokenizer.vocab_size)
    trainer.begin_grpo(GrpoSection(kl_coef=0.0))
    for step in range(STEPS):
        first = step * TASKS * GROUP
        seeds = list(range(first, first + TASKS * GROUP))
        attempts = player.run([environment(seed // GROUP) for seed in seeds], seeds)
        groups = []
        for start in range(0, len(attempts), GROUP):
            members = attempts[start : start + GROUP]
            advantages = group_advantages([attempt.outcome for attempt in members], min_std=0.0)
            if advantages is not None:
                for attempt, advantage in zip(members, advantages, strict=True):
                    attempt.advantage = advantage
                groups.append(as_group(members))
        metrics = update(trainer, groups, learning_rate=1e-3)
        engine.update_weights(named_hf_tensors(trained))
        reward = sum(attempt.outcome for attempt in attempts) / len(attempts)
        print(f"step {step}: reward {reward:.3f}, grad_norm {metrics['grad_norm']:.3f}")
        assert metrics["grad_norm"] > 0 and not metrics["skipped"], metrics
        assert metrics["logprob_gap_max"] < 1e-4, "sampler and trainer differ"
        assert set(attempts[0].weight_versions) == {-1, step + 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
