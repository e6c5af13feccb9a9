"""Estimates what a run will pay at endpoints, from a probe: a few of its tasks, played once."""

import math

from nanorchestra.agent.attempts import play
from nanorchestra.agent.load import fetch_model, load_rollout
from nanorchestra.agent.loop import AttemptLimits
from nanorchestra.config import Config
from nanorchestra.errors import require
from nanorchestra.model.hub import is_model, names_model
from nanorchestra.records import Trajectory
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from worlds.load import open_world
from worlds.metrics import finished, interval


def api_bill(config: Config, count: int, sandbox: Sandbox) -> str:
    """Returns lines with the US dollars that the calls of a run will cost, and their interval.

    The policy of model.path plays the first `count` training tasks, with the experts that the
    config names: real ones are paid, simulated ones charge the catalogue's prices. UserError
    without weights, or if no attempt was finished.
    """
    require(count >= 2, f"--probe is {count}; it must be 2 tasks or more")
    word = config.model.path
    wrong = f"--probe: model.path is {word!r}; it must be a checkpoint, which plays"
    require(names_model(word), wrong)
    path = fetch_model(word).path
    require(is_model(path), wrong)
    spending = Spending()
    world = open_world(config.task, config.run.seed, sandbox, spending)
    sampling = {"temperature": config.rollout.temperature}
    rollout = load_rollout(path, AttemptLimits.of(config.rollout), sampling, running=min(count, 64))
    rollout.rebuild = config.rollout.context == "rebuild"
    tasks = [world.task("train", index) for index in range(count)]
    seeds = [config.run.seed * 1_000_003 + i for i in range(count)]

    def environment(i):
        return world.environment(tasks[i], seeds[i])

    attempts, _ = play(rollout, environment, seeds)
    played = [attempt for _, attempt in finished(zip(tasks, attempts, strict=True))]
    require(not spending.broken, spending.broken)
    failures = [attempt.failure for attempt in attempts if attempt.failure]
    require(
        len(played) > 1,
        f"--probe: {len(played)} of {count} attempts were finished; the first failure: "
        f"{''.join(failures[:1]) or 'none'}",
    )
    usd, low, high = interval([_calls_usd(attempt) for attempt in played])
    grpo = config.grpo
    steps = grpo.steps
    if grpo.epochs:
        size = world.size("train")
        require(
            size is not None,
            f"grpo.epochs is {grpo.epochs}, but task.world, {config.task.world!r}, has tasks "
            "without end; set grpo.steps, and epochs to 0",
        )
        steps = math.ceil(grpo.epochs * size / grpo.prompts)
    training = steps * grpo.prompts * grpo.group_size
    evaluated = 2 * config.evaluation.tasks
    number = training + evaluated
    recorded = "recorded" if spending.replies else "simulated: at the catalogue's prices"
    real = "paid" if spending.spent else recorded
    lines = [
        f"API bill, from a probe of {len(played)} tasks (experts {real}):",
        f"  ${usd:.4g} an attempt [{low:.4g}, {high:.4g}], {number:,} attempts "
        f"({training:,} of training, {evaluated:,} held out)",
        f"  ${usd * number:,.2f} in all [{low * number:,.2f}, {high * number:,.2f}], "
        "95% bootstrap interval over tasks",
    ]
    if spending.spent:
        parts = ", ".join(f"{name} ${part:.4g}" for name, part in spending.bill.most_common())
        lines.append(f"  the probe cost ${spending.spent:.4g}: {parts}")
    return "\n".join(lines)


def _calls_usd(attempt: Trajectory) -> float:
    """Returns the US dollars of an attempt's calls, without the policy's own tokens."""
    return sum(result.cost_usd for turn in attempt.turns for result in turn.results)
