"""Evaluates a checkpoint, and the fixed routers it must beat, on held-out tasks of the miniature.

    python evaluate.py --model assets/nano --tasks 480 --seed 0 [--json FILE]

A router is a generator: it yields calls, is sent their results, and returns its answer. Routers play in the same environments and are
scored and billed in the same way, but pay for no tokens of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Generator, NoReturn, Sequence

from tqdm import tqdm

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Limits, Rollout
from nanorchestra.errors import UserError
from nanorchestra.files import write_whole
from nanorchestra.records import Task, ToolCall, ToolResult, Trajectory
from nanorchestra.report.run import number, table
from nanorchestra.tools.sandbox import Sandbox
from reward import Bounds, preference_score, task_reward
from worlds.miniature.world import (
    FITS,
    SUBJECTS,
    World,
    calls_for,
    environment,
    expected_cost,
    is_expert,
    preference_name,
    read_result,
    skill,
)

NANO = Path(__file__).parent / "assets" / "nano"  # the bundled checkpoint
Play = Generator[tuple[dict[str, Any], ToolCall], ToolResult, str]
Router = Callable[[Task, random.Random], Play]


def task_bounds(task: Task) -> Bounds:
    """Known before any attempt: from nothing to one call of the dearest, and of the slowest, tool on offer; a task may bring its own."""
    if "bounds" in task.data:
        return Bounds(*task.data["bounds"])
    tools = task.data["tools"]
    return Bounds(
        (0.0, max(expected_cost(t, task.data["difficulty"]) for t in tools)),
        (0.0, float(max(t["latency"] for t in tools))),
    )


def score(task: Task, trajectory: Trajectory) -> Trajectory:
    """Fills in the trajectory's reward in its absolute form, which is what an evaluation compares."""
    trajectory.reward = task_reward(
        trajectory.outcome,
        trajectory.cost_usd,
        trajectory.latency_s,
        trajectory.calls,
        task.preference,
        task_bounds(task),
    )
    return trajectory


def summarise(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Means per task: reward, accuracy, cost_usd, latency_s, preference; cost_per_correct_usd, avoided_rate; by preference and by kind.

    `failed` counts the attempts that the infrastructure failed: they are in no mean. UserError if all of them did.
    """
    pairs = [
        (task, t)
        for task, t in zip(tasks, trajectories, strict=True)
        if t.status != "infrastructure"
    ]
    if not pairs:
        raise UserError(
            f"held-out tasks: all {len(tasks)} attempts failed for reasons of the infrastructure; see that the tools and endpoints answer"
        )

    def split(key: Callable[[Task], str]) -> dict[str, dict[str, float]]:
        rows = {
            name: [pair for pair in pairs if key(pair[0]) == name]
            for name in sorted({key(task) for task, _ in pairs})
        }
        return {name: {"tasks": len(members)} | means(members) for name, members in rows.items()}

    correct = sum(t.outcome for _, t in pairs)
    return (
        {"tasks": len(tasks), "failed": len(tasks) - len(pairs)}
        | means(pairs)
        | obedience(pairs)
        | {
            "cost_per_correct_usd": sum(t.cost_usd for _, t in pairs) / correct
            if correct
            else None,
            "by_preference": split(
                lambda task: task.data.get("wish") or preference_name(task.preference)
            ),
            "by_kind": split(lambda task: task.data["kind"]),
        }
    )


def means(pairs: Sequence[tuple[Task, Trajectory]]) -> dict[str, float]:
    """Per task: reward, accuracy in 0..1, cost in dollars, latency in seconds."""
    return {
        "reward": fmean(t.reward for _, t in pairs),
        "accuracy": fmean(t.outcome for _, t in pairs),
        "cost_usd": fmean(t.cost_usd for _, t in pairs),
        "latency_s": fmean(t.latency_s for _, t in pairs),
    }


def obedience(pairs: Sequence[tuple[Task, Trajectory]]) -> dict[str, float | None]:
    """Mean preference score, the share that used a tool the task forbids (None if no task forbids any), and that of well-formed attempts."""
    kept = [
        preference_score(t.cost_usd, t.latency_s, t.calls, task.preference, task_bounds(task))
        for task, t in pairs
    ]
    asked = [
        any(t.calls.get(name) for name in task.preference.avoided)
        for task, t in pairs
        if task.preference.avoided
    ]
    return {
        "preference": fmean(kept),
        "avoided_rate": fmean(asked) if asked else None,
        "well_formed": fmean(t.well_formed for _, t in pairs),
    }


# The routers.


def _experts(task: Task) -> list[dict[str, Any]]:
    return [t for t in task.data["tools"] if is_expert(t)]


def _strength(offered: dict[str, Any]) -> int:
    return ("small", "specialist", "medium", "large").index(
        "specialist" if offered["what"] in SUBJECTS else offered["what"]
    )


def strongest(task: Task, rng: random.Random) -> Play:
    """Always the strongest expert on offer, once."""
    return _until_sure(task, [max(_experts(task), key=_strength)])


def cheapest(task: Task, rng: random.Random) -> Play:
    """Always the cheapest expert on offer, once."""
    return _until_sure(task, [min(_experts(task), key=lambda t: t["price"])])


def cascade(task: Task, rng: random.Random) -> Play:
    """Experts from the cheapest up, until one is sure."""
    return _until_sure(task, sorted(_experts(task), key=lambda t: t["price"]))


def _use(task: Task, offered: dict[str, Any]) -> Play:
    """One tool to its end: a chain of records is followed, anything else is one call. Returns (answer, sure)."""
    key = None
    while True:
        result = yield offered, calls_for(task, offered, key)
        _, answer, sure, key = read_result(task, offered, result)
        if key is None:
            return answer or "", sure


def _until_sure(task: Task, order: Sequence[dict[str, Any]]) -> Play:
    """Tools in order until one is sure; the last answer."""
    answer = ""
    for offered in order:
        answer, sure = yield from _use(task, offered)
        if sure:
            break
    return answer


def at_random(task: Task, rng: random.Random) -> Play:
    """Any tool on offer that can be used on the question at all, until one gives an answer."""
    tools = [
        t for t in task.data["tools"] if is_expert(t) or t["what"] == FITS.get(task.data["kind"])
    ]
    answer = ""
    for offered in rng.sample(tools, len(tools)):
        answer, _ = yield from _use(task, offered)
        if answer:
            break
    return answer


def rule(task: Task, rng: random.Random) -> Play:
    """By hand, by someone who knows the world: the tool that fits the question, else a specialist of the subject or what the preference asks for.

    It never uses what is to be avoided. Right: the specialist, else the strongest, and a second opinion where that is unsure.
    Cheap: from the cheapest up until one is sure. Fast: the fastest. Balanced: the specialist, else the middle one by price.
    """
    allowed = [t for t in task.data["tools"] if t["name"] not in task.preference.avoided]
    experts = [t for t in allowed if is_expert(t)]
    for offered in allowed:
        if offered["what"] == FITS.get(task.data["kind"]):
            answer, _ = yield from _use(task, offered)
            if answer or not experts:
                return answer
    if not experts:
        return ""
    wish = preference_name(task.preference)
    by_fit = sorted(
        experts,
        key=lambda t: 9 if t["what"] == task.data["subject"] else _strength(t),
        reverse=True,
    )
    if wish == "cheap":
        order = sorted(experts, key=lambda t: t["price"])
    elif wish == "fast":
        order = [min(experts, key=lambda t: t["latency"])]
    elif wish == "right":
        order = by_fit[:2]
    else:
        by_price = sorted(experts, key=lambda t: t["price"])
        order = [
            by_fit[0] if by_fit[0]["what"] == task.data["subject"] else by_price[len(by_price) // 2]
        ]
    return (yield from _until_sure(task, order))


def perfect(task: Task, rng: random.Random) -> Play:
    """The best fixed plan (tools in order, going on while unsure) of somebody who knows every hidden skill: a ceiling, not a rival."""
    return _until_sure(task, best_plan(task))


def best_plan(task: Task) -> tuple[dict[str, Any], ...]:
    """The order of at most three tools with the highest expected reward."""
    data, wish, bounds = task.data, task.preference, task_bounds(task)
    fits = FITS.get(data["kind"])
    tools = [t for t in data["tools"] if is_expert(t) or t["what"] == fits]

    def outcomes(offered):  # [(probability, right, sure)]
        if not is_expert(offered):
            return [(1.0, 1.0, True)]
        s = skill(offered["what"], data["subject"], data["difficulty"])
        return [
            (s.right * (1 - s.unsure_if_right), 1.0, True),
            (s.right * s.unsure_if_right, 1.0, False),
            ((1 - s.right) * (1 - s.unsure_if_wrong), 0.0, True),
            ((1 - s.right) * s.unsure_if_wrong, 0.0, False),
        ]

    def expand(plan, cost, latency, calls):
        calls_needed = len(data["tables"]) if plan[0]["what"] == "records" else 1
        cost += expected_cost(plan[0], data["difficulty"]) * calls_needed
        latency += plan[0]["latency"] * calls_needed
        calls = calls | {plan[0]["name"]: 1}
        total = 0.0
        for probability, right, sure in outcomes(plan[0]):
            if sure or len(plan) == 1:
                total += probability * task_reward(right, cost, latency, calls, wish, bounds)
            else:
                total += probability * expand(plan[1:], cost, latency, calls)
        return total

    plans = [(a,) for a in tools] + [(a, b) for a in tools for b in tools if a is not b]
    plans += [
        (a, b, c)
        for a, b in [p for p in plans if len(p) == 2]
        for c in tools
        if c is not a and c is not b
    ]
    return max(plans, key=lambda plan: expand(plan, 0.0, 0.0, {}))


ROUTERS: dict[str, Router] = {
    "strongest": strongest,
    "cheapest": cheapest,
    "cascade": cascade,
    "random": at_random,
    "rule": rule,
    "perfect": perfect,
}


def play(router: Router, env: ToolEnvironment, seed: int) -> Trajectory:
    """One attempt by a router, scored and billed like the policy's."""
    task = env.task
    trajectory = Trajectory(task.id, seed, 0, [], [], [], [])
    moves = router(task, random.Random(f"router/{task.id}/{seed}"))
    result = None
    while True:
        try:
            offered, call = moves.send(result)
        except StopIteration as stop:
            trajectory.answer = stop.value
            break
        result = env.by_name[offered["name"]].call(call.arguments)
        trajectory.cost_usd += result.cost_usd
        trajectory.latency_s += result.latency_s
        trajectory.calls[call.name] = trajectory.calls.get(call.name, 0) + 1
    trajectory.outcome = env.score(trajectory.answer)
    return score(task, trajectory)


def evaluate_routers(
    tasks: Sequence[Task], seed: int, sandbox: Sandbox
) -> dict[str, dict[str, Any]]:
    return {
        name: summarise(
            tasks, [play(router, environment(task, seed, sandbox), seed) for task in tasks]
        )
        for name, router in ROUTERS.items()
    }


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    seed: int,
    sandbox: Sandbox,
    on_done=None,
    make: Callable[..., Any] = environment,
    retries: int = 2,
) -> list[Trajectory]:
    """One attempt of the policy at each task, in make(task, seed, sandbox), scored. Those that the infrastructure failed are made again, `retries` times at most."""

    def attempt(places: Sequence[int], on_done=None) -> list[Trajectory]:
        return rollout.run(
            [make(tasks[i], seed, sandbox) for i in places],
            [seed * 1_000_003 + i for i in places],
            on_done,
        )

    trajectories = attempt(range(len(tasks)), on_done)
    for _ in range(retries):
        failed = [
            i for i, trajectory in enumerate(trajectories) if trajectory.status == "infrastructure"
        ]
        for i, trajectory in zip(failed, attempt(failed) if failed else ()):
            trajectories[i] = trajectory
    return [score(task, trajectory) for task, trajectory in zip(tasks, trajectories)]


def with_price(task: Task, what: str, factor: float) -> Task:
    """The same task with the price of every tool of that kind multiplied, in the prompt and on the bill; to whole cents below a dollar, else
    to whole dollars."""

    def change(cents: int) -> int:
        cents = max(1, round(cents * factor))
        return cents if cents < 100 else round(cents, -2)

    tools = [
        t | {"price": change(t["price"])} if t["what"] == what else t for t in task.data["tools"]
    ]
    return replace(task, data=task.data | {"tools": tools})


def price_probe(
    rollout: Rollout, tasks: Sequence[Task], seed: int, sandbox: Sandbox, count: int = 120
) -> dict[str, float]:
    """How often the large expert is asked in cheap and balanced tasks that offer it, at a tenth of its price, as it is, and at ten times."""
    probed = [
        t
        for t in tasks
        if any(
            o["what"] == "large" and o["name"] not in t.preference.avoided for o in t.data["tools"]
        )
        and t.preference.cost > 0
    ]
    shares: dict[str, float] = {}
    if not probed:
        return shares
    for label, factor in (("tenth", 0.1), ("same", 1.0), ("tenfold", 10.0)):
        changed = [with_price(task, "large", factor) for task in probed[:count]]
        names = [
            next(o["name"] for o in task.data["tools"] if o["what"] == "large") for task in changed
        ]
        shares[label] = fmean(
            t.calls.get(name, 0) > 0
            for name, t in zip(names, evaluate(rollout, changed, seed, sandbox))
        )
    return shares


# The command line.


def load_policy(path: Path, quantise: str | None = None) -> tuple[Any, Any]:
    """The model and tokenizer of a checkpoint: in bfloat16 on the GPU if there is one, else in float32 on the CPU; `quantise`: its linear
    layers in "int8" or "int4". UserError."""
    import torch

    from nanorchestra import load_model

    if path.resolve() == NANO.resolve() and not (path / "config.json").exists():
        raise UserError(
            f"{path}: no checkpoint here yet; make one with `python train.py` and give --model runs/nano/model, or copy that model's files here"
        )
    model, tokenizer = load_model(
        path,
        quantise=quantise,
        **({"device": "cuda", "dtype": "bfloat16"} if torch.cuda.is_available() else {}),
    )
    if tokenizer is None:
        raise UserError(
            f"{path}: no tokenizer.json; the checkpoint's tokenizer must lie beside its weights"
        )
    return model, tokenizer


def load_rollout(
    path: Path, temperature: float, quantise: str | None = None, rebuild: bool = False
) -> Rollout:
    """A rollout of a checkpoint with the limits under which the miniature's run of train.py evaluates."""
    from nanorchestra import Engine, SamplingParams
    from nanorchestra.config import load_config
    from nanorchestra.model import chat

    limits, rows = load_config(Path(__file__).parent / "configs" / "nano.toml").rollout, 128
    model, tokenizer = load_policy(path, quantise)
    context = min(limits.context_tokens, model.config.max_position_embeddings)
    prompts = (environment(task, 0, None) for task in World(0).tasks("held_out", 20))
    longest = max(len(chat.encode(tokenizer, env.messages, env.tools)) for env in prompts)
    if longest + limits.turn_tokens > context:
        raise UserError(
            f"{path}: prompts of {longest} tokens and a turn of {limits.turn_tokens} do not fit into {context}: max_position_embeddings in its config.json is "
            f"{model.config.max_position_embeddings}, an evaluation uses {limits.context_tokens} at most; a checkpoint with a longer context is needed"
        )
    engine = Engine(
        model,
        tokenizer,
        num_pages=rows * -(-context // limits.page_size),
        page_size=limits.page_size,
        max_running=rows,
        max_context=context,
    )
    return Rollout(
        engine,
        tokenizer,
        lambda seed, budget: SamplingParams(max_tokens=budget, temperature=temperature, seed=seed),
        Limits(limits.turns, limits.turn_tokens, context),
        rebuild=rebuild,
    )


def refuse_arguments(message: str) -> NoReturn:
    """For ArgumentParser.error: one line instead of the usage."""
    raise UserError(f"{message} (--help shows the usage)")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="Evaluates a checkpoint and the fixed routers on the same held-out tasks of the miniature.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=NANO,
        metavar="PATH",
        help="a checkpoint directory in Hugging Face layout (default: the bundled nano)",
    )
    parser.add_argument(
        "--tasks", type=int, default=480, metavar="N", help="held-out tasks (default: 480)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="of the sampling; 0 is greedy (default: 1, as in training)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the tasks and of the simulated experts (default: 0)"
    )
    parser.add_argument(
        "--quantise", choices=("int8", "int4"), help="round the linear layers while loading"
    )
    parser.add_argument(
        "--context",
        choices=("append", "rebuild"),
        default="append",
        help="as rollout.context in training: a growing session, or a prompt composed each turn",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all the figures there too")
    parser.error = refuse_arguments
    try:
        options = parser.parse_args(arguments)
        if options.tasks < 1:
            raise UserError(f"--tasks is {options.tasks}; it must be at least 1")
        if not 0 <= options.temperature < float("inf"):
            raise UserError(
                f"--temperature is {options.temperature}; it must be a finite number, 0 or more"
            )
        if options.json and (
            options.json.is_dir()
            or not options.json.parent.is_dir()
            or not os.access(options.json.parent, os.W_OK)
        ):
            raise UserError(
                f"--json {options.json}: cannot be written; give a file in a directory that exists and can be written"
            )
        rollout, tasks = (
            load_rollout(
                options.model, options.temperature, options.quantise, options.context == "rebuild"
            ),
            World(options.seed).tasks("held_out", options.tasks),
        )
        with Sandbox() as sandbox:
            with tqdm(
                total=len(tasks), desc="held-out tasks", unit="task", dynamic_ncols=True
            ) as bar:
                scores = summarise(
                    tasks,
                    evaluate(rollout, tasks, options.seed, sandbox, on_done=lambda _: bar.update()),
                )
            scores["price_x10"] = price_probe(rollout, tasks, options.seed, sandbox)
            routers = evaluate_routers(tasks, options.seed, sandbox)
        print(
            table(
                {
                    "held_out": {
                        "routers": {
                            min(str(options.model), os.path.relpath(options.model), key=len): scores
                        }
                        | routers
                    }
                }
            )
        )
        spent = ", ".join(
            f"{wish} ${number(means['cost_usd'])}"
            for wish, means in scores["by_preference"].items()
        )
        print(f"cost per task, by what is asked for: {spent}")
        if scores["price_x10"]:
            print(
                "asks the large expert at a tenth of its price, as it is, at ten times: "
                + ", ".join(f"{share:.0%}" for share in scores["price_x10"].values())
            )
        if options.json:
            write_whole(
                options.json,
                (
                    json.dumps(
                        {
                            "model": str(options.model),
                            "seed": options.seed,
                            "tasks": len(tasks),
                            "policy": scores,
                            "routers": routers,
                        },
                        indent=2,
                    )
                    + "\n"
                ).encode(),
            )
        return 0
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
