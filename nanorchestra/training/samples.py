"""Turns attempts into the samples that the trainer packs, and writes back what it computed."""

from collections.abc import Sequence
from os.path import commonprefix  # of any lists, not of paths alone

from nanorchestra.records import Trajectory
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.trajectories import contexts


def ids_in_loss(attempt: Trajectory, drop_invalid_format: bool = False) -> list[bool]:
    """Returns which ids enter the loss: sampled ones.

    drop_invalid_format: without those of badly formed turns.
    """
    mask = list(attempt.sampled)
    for turn in attempt.turns:
        if drop_invalid_format and not turn.well_formed:
            mask[turn.start : turn.end] = [False] * (turn.end - turn.start)
    return mask


def gave_answer(attempt: Trajectory) -> bool:
    """Returns whether an attempt ended with an answer, and has a well-formed turn to learn from."""
    answered = attempt.status == "answered" and bool(attempt.answer)
    return answered and any(ids_in_loss(attempt, drop_invalid_format=True))


def as_group(attempts: Sequence[Trajectory], drop_invalid_format: bool = False) -> Group:
    """Returns attempts at one task as a group of samples.

    Each context that has ids in the loss is a sample: one growing session, or with rebuilt prompts
    every turn.
    """
    prompts = []
    samples = []
    for attempt in attempts:
        mask = ids_in_loss(attempt, drop_invalid_format)
        for begin, start, end in contexts(attempt):
            if any(mask[begin:end]):
                ids, logprobs = attempt.ids[begin:end], attempt.logprobs[begin:end]
                prompts.append(attempt.ids[begin:start])
                samples.append(Sample(ids, mask[begin:end], logprobs, attempt.advantage))
    return Group(samples, len(commonprefix(prompts)))


def record_logprobs(
    attempts: Sequence[Trajectory],
    trainer_logprobs: Sequence[Sequence[float]],
    drop_invalid_format: bool = False,
) -> None:
    """Writes the trainer's log-probabilities on the attempts that the samples were made of.

    trainer_logprobs[k] are those of sample k of the attempts' groups, in order, one for each id in
    the loss. Other sampled ids get None.
    """
    logprobs = iter([logprob for sample in trainer_logprobs for logprob in sample])
    for attempt in attempts:
        mask = ids_in_loss(attempt, drop_invalid_format)
        attempt.trainer_logprobs = []
        for sampled, in_loss in zip(attempt.sampled, mask, strict=True):
            if sampled:
                attempt.trainer_logprobs.append(next(logprobs) if in_loss else None)


def rewritten_share(attempts: Sequence[Trajectory]) -> float:
    """Returns the share of turns, after the first of an attempt, with a prompt of their own.

    With rebuilt context it is 1. An agent that rewrites what was said before raises it from 0.
    """
    following = sum(max(0, len(attempt.turns) - 1) for attempt in attempts)
    return sum(len(contexts(attempt)) - 1 for attempt in attempts) / max(1, following)
