"""The scheduler on a virtual clock: how long a workload would take on a device whose every step runs at its roofline.

The real `Scheduler` and `PageCache` plan the steps; only the computation is replaced by its time. Beside the makespan stands a lower
bound that no scheduler can pass on the same device, so that what is lost is the scheduler's doing. `python -m benchmarks.engine` prints it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.scheduler import Plan, Scheduler


@dataclass(frozen=True)
class Device:
    """What bounds a step: bytes and FLOPs a second as measured on large copies and matrix products, and bytes for the KV pool."""

    bandwidth: float
    flops: float
    pool_bytes: float


H200 = Device(4.3e12, 790e12, 116e9)


@dataclass(frozen=True)
class Costs:
    """What a decoder of this shape takes in bf16: a token in the linear layers, a row of logits, a pair of query and key, KV."""

    weight_bytes: float
    token_flops: float
    logit_flops: float
    pair_flops: float
    kv_bytes: float

    @classmethod
    def of(cls, config) -> Costs:
        """Of a ModelConfig."""
        heads, kv_heads, dim, layers = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.num_hidden_layers,
        )
        linear = (
            layers
            * config.hidden_size
            * ((2 * heads + 2 * kv_heads) * dim + 3 * config.intermediate_size)
        )
        head = config.vocab_size * config.hidden_size
        return cls(
            2 * (linear + head),
            2 * linear,
            2 * head,
            4 * layers * heads * dim,
            2 * 2 * layers * kv_heads * dim,
        )


@dataclass
class Episode:
    """One attempt: a prompt, then turns of (tokens sampled, seconds the tool takes, tokens given after it). Equal `group`: equal prompt."""

    group: int
    prompt: int
    turns: list[tuple[int, float, int]]

    @property
    def sampled(self) -> int:
        return sum(sampled for sampled, _, _ in self.turns)


@dataclass
class Result:
    """makespan and bound in seconds; gap: the most steps that a running request waited for a token."""

    makespan: float = 0.0
    bound: float = 0.0
    steps: int = 0
    gap: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0


def workloads(seed: int = 0, scale: float = 1.0) -> dict[str, list[Episode]]:
    """Three fixed workloads, all submitted at once: chats of ragged lengths, groups of 16 on a prompt of 4k, tool loops of 30 turns."""
    rng = random.Random(seed)

    def ragged(mean: float, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(0, 0.6) * mean)))

    chat = [
        Episode(i, ragged(500, 4000), [(ragged(250, 1000), 0.0, 0)])
        for i in range(round(3000 * scale))
    ]
    groups = [
        Episode(i, 4096, [(ragged(300, 1000), 0.0, 0)])
        for i in range(round(64 * scale))
        for _ in range(16)
    ]
    loops = [
        Episode(
            i, 1000, [(ragged(40, 150), rng.expovariate(5.0), ragged(60, 300)) for _ in range(30)]
        )
        for i in range(round(192 * scale))
    ]
    return {"chat": chat, "groups of 16": groups, "tool loops": loops}


@dataclass
class _Attempt:
    episode: Episode
    ids: list[int]
    turn: int = 0
    session: int = -1
    table: PageTable = field(default_factory=PageTable)


def simulate(
    episodes: list[Episode],
    costs: Costs,
    device: Device = H200,
    *,
    page_size: int = 64,
    max_batch_tokens: int = 2048,
    max_running: int = 1024,
) -> Result:
    """Runs the episodes to their end; MemoryError if one can never fit."""
    pages = int(device.pool_bytes / costs.kv_bytes / page_size)
    if max(e.prompt + sum(s + g for s, _, g in e.turns) for e in episodes) > pages * page_size:
        raise MemoryError(f"an episode is longer than the pool of {pages * page_size} tokens")
    scheduler = Scheduler(PageCache(pages, page_size), max_batch_tokens, max_running)
    fresh, numbers = itertools.count(1_000_000), itertools.count()
    prompts = {e.group: [next(fresh) for _ in range(e.prompt)] for e in episodes}
    ready = [
        (0.0, next(numbers), _Attempt(e, list(prompts[e.group]))) for e in episodes
    ]  # a heap by time
    attempts: dict[Request, _Attempt] = {}
    last_token: dict[Request, int] = {}
    result, clock = Result(bound=lower_bound(episodes, costs, device)), 0.0
    while ready or attempts:
        if not attempts:
            clock = max(clock, ready[0][0])
        while ready and ready[0][0] <= clock:
            _, _, attempt = heapq.heappop(ready)
            request = Request(
                next(numbers),
                list(attempt.ids),
                SamplingParams(),
                len(attempt.ids) + attempt.episode.turns[attempt.turn][0],
                frozenset(),
                table=attempt.table,
                keeps_pages=True,
                resumed=bool(attempt.table.pages),
                session=attempt.session,
                prompt_tokens=len(attempt.ids),
            )
            attempt.session = request.session
            attempts[request] = attempt
            scheduler.add(request)
        plan = scheduler.plan()
        clock += _seconds(plan, attempts, costs, device)
        scheduler.commit(plan)
        result.steps += 1
        result.prefill_tokens += sum(count for _, _, count in plan.prefills)
        for request in plan.sampling:
            result.gap = max(result.gap, result.steps - last_token.get(request, result.steps))
            last_token[request] = result.steps
            result.sampled_tokens += 1
            if request.accept(next(fresh), 0.0):
                scheduler.finish(request, "length")
                del last_token[request]
                attempt = attempts.pop(request)
                _, wait, given = attempt.episode.turns[attempt.turn]
                attempt.turn += 1
                attempt.ids = request.ids + [next(fresh) for _ in range(given)]
                if attempt.turn < len(attempt.episode.turns):
                    heapq.heappush(ready, (clock + wait, next(numbers), attempt))
                else:
                    scheduler.close(attempt.table)
        last_token = {
            request: step for request, step in last_token.items() if request.table.pages
        }  # a preempted one does not run
    result.makespan, result.preemptions = clock, scheduler.preemptions
    return result


def _seconds(plan: Plan, attempts: dict[Request, _Attempt], costs: Costs, device: Device) -> float:
    """A step's time: the linear layers bound by their weights or their FLOPs, then attention bound by KV bytes and FLOPs.

    The rows of a group read their prompt once together.
    """
    tokens = len(plan.decodes) + sum(count for _, _, count in plan.prefills)
    kv, prompts = 0, {}
    for request in plan.decodes:
        episode = attempts[request].episode
        prompts[episode.group] = episode.prompt
        kv += len(request.ids) - episode.prompt
    pairs = sum(count * (start + (count + 1) / 2) for _, start, count in plan.prefills)
    kv += sum(prompts.values()) + sum(start for _, start, _ in plan.prefills)
    linear = max(
        costs.weight_bytes / device.bandwidth,
        (tokens * costs.token_flops + len(plan.sampling) * costs.logit_flops) / device.flops,
    )
    return linear + kv * costs.kv_bytes / device.bandwidth + pairs * costs.pair_flops / device.flops


def lower_bound(episodes: list[Episode], costs: Costs, device: Device) -> float:
    """Seconds that any schedule takes: the larger of two bounds.

    Work: every token through the linear layers once (prompts once a group), at full FLOPs or at one reading of the weights for each of the
    longest episode's tokens; each decoded token reads its own KV, a group's prompt is read as often as its longest member has tokens.
    Path: an episode alone, its tools' time included.
    """
    prompts = {e.group: e.prompt for e in episodes}
    longest: dict[int, int] = {}
    tokens, kv, pairs, path = (
        sum(prompts.values()),
        0.0,
        sum(n * (n + 1) / 2 for n in prompts.values()),
        0.0,
    )
    for episode in episodes:
        longest[episode.group] = max(
            longest.get(episode.group, 0), episode.sampled - len(episode.turns)
        )
        length, alone = 0, 0.0  # beyond the prompt
        for turn, (sampled, wait, _) in enumerate(episode.turns):
            given = (
                episode.turns[turn - 1][2] + 1 if turn else 0
            )  # and the last sampled token of the turn before
            tokens += given + sampled - 1
            pairs += given * (episode.prompt + length + (given + 1) / 2)
            kv += sum(range(length + given + 1, length + given + sampled)) + (
                length + episode.prompt if turn else 0
            )
            length += given + sampled - 1
            alone += sampled * costs.weight_bytes / device.bandwidth + (
                wait if turn + 1 < len(episode.turns) else 0.0
            )
        path = max(path, alone)
    kv += sum(prompts[group] * count for group, count in longest.items())
    samples = sum(e.sampled for e in episodes)
    linear = max(
        max(e.sampled for e in episodes) * costs.weight_bytes / device.bandwidth,
        (tokens * costs.token_flops + samples * costs.logit_flops) / device.flops,
    )
    return max(
        path,
        linear + kv * costs.kv_bytes / device.bandwidth + pairs * costs.pair_flops / device.flops,
    )
