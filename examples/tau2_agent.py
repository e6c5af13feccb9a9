"""tau2-bench's own LLMAgent in training: its loop, tasks, users and rewards, our policy.

    export PYTHONPATH=tau2-bench/src TAU2_DOMAIN=retail TAU2_USER=gpt-4.1
    python train.py --config qwen3-8b --task.world examples/tau2_agent.py \
        --task.agent examples/tau2_agent.py:play

TAU2_USER is the model that plays users, as litellm names it; TAU2_USER_ARGS its arguments as JSON.
"""

import json
import os

from tau2.agent.llm_agent import LLMAgent
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.runner.build import build_environment, build_user
from tau2.runner.helpers import get_tasks, load_task_splits
from tau2.runner.simulation import run_simulation

DOMAIN = os.environ.get("TAU2_DOMAIN", "mock")
STEPS = 40
SPLITS = {"train": "train", "held_out": "test"}  # of tau2; a domain without them has "base" alone


class Tau2Tasks:
    """The world: a task is a seed, by which `play` chooses one of tau2."""

    def reset(self, seed):
        """Returns what stands for the question."""
        return f"Task {seed} of {DOMAIN}"


def play(attempt):
    """Returns tau2's reward of one simulation."""
    seed, split = attempt.task["seed"], SPLITS[attempt.task["split"]]
    has_split = split in (load_task_splits(DOMAIN) or {})
    tasks = get_tasks(DOMAIN, task_split_name=split if has_split else "base")
    task = tasks[seed % len(tasks)]
    environment = build_environment(DOMAIN)
    policy = {"api_base": attempt.base_url, "api_key": attempt.api_key, "num_retries": 0}
    agent = LLMAgent(environment.get_tools(), environment.get_policy(), "openai/policy", policy)
    user_args = json.loads(os.environ.get("TAU2_USER_ARGS", "{}"))
    user = build_user(
        "user_simulator",
        environment,
        task,
        llm=os.environ.get("TAU2_USER", "gpt-4.1"),
        llm_args=user_args,
    )
    orchestrator = Orchestrator(
        domain=DOMAIN,
        agent=agent,
        user=user,
        environment=environment,
        task=task,
        max_steps=STEPS,
        seed=seed,
    )
    try:
        return float(run_simulation(orchestrator).reward_info.reward)
    except ValueError as error:
        if "must have either content or tool_calls" in str(error):
            return 0.0  # the policy said nothing, which tau2 does not survive
        raise
