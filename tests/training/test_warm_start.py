"""The warm start: what it learns from, and when the policy is as close to the teacher as wanted."""

from __future__ import annotations

import math

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.world import Lesson
from nanorchestra.config import Config
from nanorchestra.model.checkpoint import NANO
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Task
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.progress import Progress
from nanorchestra.training.warm_start import Demonstrations

SETTINGS = {"warm_start.steps": 100, "warm_start.prompts": 6, "warm_start.teacher_kl": 0.01}


class Coin:
    """Each task is demonstrated twice: the teacher says heads or tails, with a chance of a half."""

    def task(self, split, index):
        return Task(f"{split}-{index}", "Heads or tails?")

    def lesson(self, index, most_tools=0):
        side = ("heads", "tails")[index % 2]
        env = ToolEnvironment(self.task("train", index // 2), [])
        return env, [Lesson("a guess", side, logprob=math.log(0.5))]


def test_the_steps_end_when_the_loss_is_the_entropy_of_the_teacher():
    demonstrations = Demonstrations(Config().replace(SETTINGS), Coin(), Tokenizer.from_dir(NANO))
    groups = demonstrations.groups(0, 3, Ranks())
    assert [len(group.samples) for group in groups] == [2, 2, 2], "demonstrations of one task"
    count = sum(sample.loss_ids for group in groups for sample in group.samples)
    entropy = 6 * math.log(2) / count  # nats per id: six coins

    def steps(losses):
        progress = Progress()
        while progress.step < 100 and not demonstrations.learnt(progress):
            loss = losses(progress.step)
            progress.step += 1
            demonstrations.advance(progress, loss)
        return progress.step

    assert steps(lambda step: entropy + 0.011) == 100
    assert steps(lambda step: entropy + 0.009) < 10
    assert 25 < steps(lambda step: entropy + (1.0 if step < 20 else 0.0)) < 60
