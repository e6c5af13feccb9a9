"""Programs that play attempts: what a policy is compared with where a person can write one.

A program is a generator: it yields calls, is sent their results, and returns the answer. Its
attempts are billed as a policy's are, but for tokens of its own. A `Play` begins one.
"""

import asyncio
from collections.abc import Callable, Generator

from nanorchestra.agent.environment import Environment, score_answer
from nanorchestra.agent.limits import UserLimits
from nanorchestra.records import Price, ToolCall, ToolResult, Trajectory, Turn

Program = Generator[ToolCall, ToolResult, str]
Play = Callable[[Environment], Program]


class ProgramAttempt:
    """An attempt without a model, one call a turn, within the user's hard limits."""

    def __init__(self, env: Environment, seed: int):
        self.env = env
        self.trajectory = Trajectory(env.task.id, seed)
        self._limits = UserLimits(env, self.trajectory, Price(0.0, 0.0))

    @property
    def failed(self) -> bool:
        """Whether the infrastructure has failed the attempt."""
        return self.trajectory.status == "infrastructure"

    def call(self, call: ToolCall) -> ToolResult:
        """Makes a call and records it as a turn."""
        (result,) = asyncio.run(self._limits.execute([call], 1))
        turn = Turn(0, 0, "stop")
        self.trajectory.turns.append(turn)
        self.trajectory.add_calls(turn, [call], [result])
        if result.infrastructure:
            self.trajectory.status = "infrastructure"
        return result

    def finish(self) -> Trajectory:
        """Returns the trajectory with its outcome; a failed one has none."""
        if not self.failed:
            score_answer(self.env, self.trajectory)
        return self.trajectory


def play_program(play: Play, env: Environment, seed: int = 0) -> Trajectory:
    """Returns the attempt that a program plays in an environment."""
    attempt, program, result = ProgramAttempt(env, seed), play(env), None
    try:
        while not attempt.failed:
            result = attempt.call(program.send(result))
    except StopIteration as end:
        attempt.trajectory.answer = end.value
    return attempt.finish()
