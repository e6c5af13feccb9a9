"""Plays tau2-bench's tasks by its own package, for its leaderboard.

tau2-bench's LLMAgent asks the policy by litellm, through an endpoint inside this process or at
MODEL@URL. Its orchestrator, user simulator, evaluator, checkpoints and metrics are used as they
are: nothing here touches a conversation or a reward. A domain becomes one file of its Results.
"""

import json
import os
import secrets
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from nanorchestra import formats
from nanorchestra.errors import UserError, require
from nanorchestra.records import Price
from nanorchestra.report.tables import aligned
from nanorchestra.schemas import Json
from nanorchestra.serving.api import Server
from nanorchestra.serving.http import address, listen
from nanorchestra.tools.spending import Spending
from nanorchestra.units import dollars, mean_and_ends, percent
from worlds.metrics import FAILURE_CHARS, interval
from worlds.policies import CHANGE, PRICE, SAMPLING, Policy
from worlds.terminal import OpenQuestions

PREFIX = "tau2:"
# litellm's provider for a server of OpenAI's API. Address and key are variables of the environment,
# so that they stand in no trajectory.
PROVIDER = "hosted_vllm"
ADDRESS, KEY = "HOSTED_VLLM_API_BASE", "HOSTED_VLLM_API_KEY"
APPLIED = {  # changes that hold here, by kind of policy
    "checkpoint": ("turn_tokens", "context_tokens", *SAMPLING),
    "endpoint": ("temperature", *PRICE),
}
STOP_S = 30.0  # that the endpoint may take to end
INSTALL = (
    "needs tau2-bench 1.0.1: clone its repository, install what its pyproject.toml lists, and set "
    "PYTHONPATH=tau2-bench/src"
)


@dataclass(frozen=True)
class Tau2Domain:
    """A domain of tau2-bench, its tasks, and how banking_knowledge retrieves."""

    world: str
    name: str
    tasks: list[Any]
    retrieval: str | None

    @property
    def file_name(self) -> str:
        """Its name without an ending, for a file."""
        return self.world.removeprefix(PREFIX).replace(":", "-")


@dataclass(frozen=True)
class Tau2User:
    """The model that plays users, as litellm names it, and its arguments."""

    model: str
    arguments: Json


def open_domain(world: str, count: int) -> Tau2Domain:
    """Returns the domain of "tau2:DOMAIN" or "tau2:banking_knowledge:RETRIEVAL". UserError.

    It has the first `count` tasks of the split "base", which is that of the leaderboard.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it is fetched at each start
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    try:
        import litellm
        from tau2.config import DEFAULT_LLM_NL_ASSERTIONS
        from tau2.data_model.tasks import RewardType
        from tau2.registry import registry
        from tau2.runner.helpers import get_environment_info, get_tasks
    except ImportError as error:
        raise UserError(f"--world {world} {INSTALL} ({error})") from None
    litellm.suppress_debug_info = True  # lines on stdout that ask for feedback
    name, _, retrieval = world.removeprefix(PREFIX).partition(":")
    known = sorted(registry.get_domains())
    require(name in known, f"--world {world}: tau2-bench has no such domain, but {known}")
    try:
        tasks = get_tasks(name, task_split_name="base", num_tasks=count)
        settings = {"retrieval_variant": retrieval} if retrieval else {}
        get_environment_info(name, env_kwargs=settings)
    except Exception as error:
        cause = _in_one_line(error)
        raise UserError(
            f"--world {world}: tau2-bench cannot open it ({cause}); its data are in the folder "
            "that TAU2_DATA_DIR names"
        ) from None
    judged = 0
    for task in tasks:
        criteria = task.evaluation_criteria
        judged += criteria is not None and RewardType.NL_ASSERTION in (criteria.reward_basis or ())
    missing = litellm.validate_environment(DEFAULT_LLM_NL_ASSERTIONS)["missing_keys"]
    require(
        not (judged and missing),
        f"--world {world}: tau2-bench has {judged} of its tasks judged by "
        f"{DEFAULT_LLM_NL_ASSERTIONS}, and {', '.join(missing)} is not set",
    )
    return Tau2Domain(world, name, tasks, retrieval or None)


def user_of(model: str, arguments: str) -> Tau2User:
    """Returns the user of --user and --user-args, JSON. UserError."""
    require(model, "--user: tau2-bench's users need a model, as litellm names it, such as gpt-4.1")
    require(
        not model.startswith(f"{PROVIDER}/"),
        f"--user {model}: the policy is asked so; it must be openai/MODEL with api_base in "
        "--user-args",
    )
    try:
        read = json.loads(arguments)
    except ValueError:
        read = None
    right = (
        "--user-args must be a JSON object of arguments for litellm, like '{\"temperature\": 0}'"
    )
    require(isinstance(read, dict), right)
    require(
        "api_key" not in read,
        "--user-args: api_key would be recorded; litellm reads the key from the environment",
    )
    return Tau2User(model, read)


def check_policies(policies: list[Policy]) -> None:
    """Raises UserError for a change that tau2-bench's agent would not know of."""
    for policy in policies:
        changes = [change.partition("=")[0] for change in CHANGE.split(policy.text)[1:]]
        applied = APPLIED[policy.kind]
        wrong = [change for change in changes if change not in applied]
        right = f"with tau2-bench a change must be one of {', '.join(applied)}"
        require(not wrong, f"--policy {policy.text}: {', '.join(wrong)}: {right}")


def play(
    domain: Tau2Domain,
    policy: Policy,
    user: Tau2User,
    file: Path,
    trials: int,
    parallel: int,
    seed: int,
) -> Json:
    """Plays each task `trials` times, `parallel` at a time; returns `measure` of all. UserError.

    `file` gets each simulation as it ends. What it already has is not played again, but for what
    the infrastructure failed.
    """
    from tau2.config import DEFAULT_LLM_ARGS_USER
    from tau2.data_model.simulation import Results, TerminationReason, TextRunConfig
    from tau2.runner.batch import run_tasks

    if file.exists():
        results = Results.load(file)
        reasons = [each.termination_reason for each in results.simulations]
        complete = len(reasons) == trials * len(domain.tasks)
        if complete and TerminationReason.INFRASTRUCTURE_ERROR not in reasons:
            return measure(results, policy.priced)
    _report_to_stderr()
    user_arguments = DEFAULT_LLM_ARGS_USER | user.arguments
    _check_answers("--user", user.model, user_arguments)
    with _asked(policy, parallel) as (model, arguments):
        config = TextRunConfig(
            domain=domain.name,
            retrieval_config=domain.retrieval,
            agent="llm_agent",
            llm_agent=model,
            llm_args_agent=arguments,
            user="user_simulator",
            llm_user=user.model,
            llm_args_user=user_arguments,
            num_trials=trials,
            max_concurrency=parallel,
            seed=seed,
            auto_resume=True,
            log_level="CRITICAL",  # what fails stands in the results
        )
        try:
            results = run_tasks(config, domain.tasks, save_path=file, console_display=False)
        except ValueError as error:  # the tasks are others than those of the file
            raise UserError(f"{file}: {' '.join(str(error).split())[:300]}") from None
    return measure(results, policy.priced)


def measure(results: Any, priced: bool) -> Json:
    """Returns tau2-bench's figures of its Results, and 95% bootstrap intervals over tasks.

    `pass_hat`[k-1] is pass^k as (mean, low, high), `cost_usd` the US dollars of the policy's tokens
    an attempt, None if not `priced`. As in tau2-bench, `failed` attempts enter neither.
    `pass_1_with_failed` counts them as wrong.
    """
    from tau2.data_model.simulation import TerminationReason
    from tau2.metrics.agent_metrics import compute_metrics, get_tasks_pass_hat_k, is_successful

    played, failed, costs, right = [], [], defaultdict(list), 0
    for simulation in results.simulations:
        if simulation.termination_reason == TerminationReason.INFRASTRUCTURE_ERROR:
            failed.append(str((simulation.info or {}).get("error", "")))
            continue
        played.append(simulation)
        if simulation.agent_cost is not None:  # a conversation may begin with turns of no cost
            costs[simulation.task_id].append(simulation.agent_cost)
        right += is_successful(simulation.reward_info.reward)
    # tau2-bench leaves the failed ones out itself, but with pandas 3 it stumbles over them.
    kept = results.model_copy(update={"simulations": played})
    theirs = compute_metrics(kept)
    by_task = get_tasks_pass_hat_k(kept) if played else {}
    pass_hat = []
    for k, mean in sorted(theirs.pass_hat_ks.items()):
        _, low, high = interval(by_task[f"pass^{k}"].tolist())
        pass_hat.append((float(mean), low, high))
    cost = None
    if priced and costs:
        _, low, high = interval([fmean(each) for each in costs.values()])
        cost = (float(theirs.avg_agent_cost), low, high)
    return {
        "tasks": len(results.tasks),
        "attempts": len(results.simulations),
        "failed": len(failed),
        "failure": " ".join(failed[0].split())[:FAILURE_CHARS] if failed else "",
        "pass_hat": pass_hat,
        "pass_1_with_failed": right / max(1, len(results.simulations)),
        "cost_usd": cost,
        "user_usd": fmean(each.user_cost or 0.0 for each in played) if played else None,
    }


def lines_of(world: str, summaries: dict[str, Json]) -> list[str]:
    """Returns the figures of each policy as a table of a terminal, and what failed."""
    trials = max(len(summary["pass_hat"]) for summary in summaries.values())
    rows = [[world, *(f"pass^{k}" for k in range(1, trials + 1)), "cost", "user"]]
    notes = []
    for name, summary in summaries.items():
        rates = [mean_and_ends(percent, *rate) for rate in summary["pass_hat"]]
        rates += ["-"] * (trials - len(rates))
        cost, user = summary["cost_usd"], summary["user_usd"]
        paid = mean_and_ends(dollars, *cost) if cost else "-"
        rows.append([name, *rates, paid, dollars(user) if user else "-"])
        if summary["failed"]:
            notes.append(
                f"{name}: {summary['failed']} of {summary['attempts']} attempts failed, which "
                "tau2-bench leaves out; as wrong ones they make pass^1 "
                f"{percent(summary['pass_1_with_failed'])}. The same command plays them again. "
                f"The first: {summary['failure']}"
            )
    return [*aligned(rows), *notes]


# How the policy is asked.


@contextmanager
def _asked(policy: Policy, parallel: int) -> Iterator[tuple[str, Json]]:
    """Yields litellm's name of the policy and its arguments, while it can be asked. UserError."""
    rollout = policy.load(Spending(), parallel)
    arguments = {}
    if "temperature" in policy.settings:
        arguments["temperature"] = policy.settings["temperature"]
    if policy.kind == "endpoint":
        name, _, url = policy.base.partition("@")
        with _variables({ADDRESS: url, KEY: os.environ.get("OPENAI_API_KEY", "none")}):
            model = _known(name, rollout.endpoint_price)
            _check_answers("--policy", model, arguments)
            yield model, arguments
        return
    name = formats.title(CHANGE.split(policy.text)[0])
    sampling = {name: policy.settings[name] for name in SAMPLING}
    arguments |= {"top_p": sampling["top_p"], "max_tokens": policy.settings["turn_tokens"]}
    key = secrets.token_urlsafe(24)
    server = Server(rollout, name, OpenQuestions([]), sampling, key=key)
    listening = listen("127.0.0.1", 0)
    serving = threading.Thread(target=server.run, args=([listening],), daemon=True)
    serving.start()
    try:
        with _variables({ADDRESS: f"{address(listening)}/v1", KEY: key}):
            yield _known(name, rollout.price), arguments
    finally:
        server.should_exit = True
        serving.join(STOP_S)


def _known(name: str, price: Price) -> str:
    """Returns litellm's name of a model, whose price it then knows."""
    import litellm

    usd_in, usd_out = price
    model = f"{PROVIDER}/{name}"
    about = {
        "litellm_provider": PROVIDER,
        "mode": "chat",
        "input_cost_per_token": usd_in / 1e6,
        "output_cost_per_token": usd_out / 1e6,
        "cache_read_input_token_cost": usd_in / 1e6,  # without a discount
        "cache_creation_input_token_cost": usd_in / 1e6,
    }
    litellm.register_model({model: about})
    return model


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _check_answers(option: str, model: str, arguments: Json) -> None:
    """Raises UserError for a model that litellm cannot ask: else each attempt would find out."""
    import litellm

    hello = [{"role": "user", "content": "Hello"}]
    try:
        litellm.completion(model=model, messages=hello, num_retries=0, **arguments)
    except Exception as error:
        cause = _in_one_line(error)
        raise UserError(f"{option} {model}: litellm cannot ask it: {cause}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _report_to_stderr() -> None:
    """Sends tau2-bench's own progress to stderr."""
    from tau2.utils.display import ConsoleDisplay

    ConsoleDisplay.console.file = sys.stderr
