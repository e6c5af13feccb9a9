"""Runs the engine's steps: one after the other, or on a GPU with the next one launched ahead."""

from typing import Any

from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw
from nanorchestra.engine.scheduler import Plan, Scheduler


class Steps:
    """Plans the steps and computes them.

    If the runner overlaps, step n + 1 is launched before the draws of step n are read, so that a
    GPU computes while the host works: the tokens go from one step to the next on the device. The
    tokens are those of a runner that does not overlap; the tests hold the two against each other.

    A request that finishes in step n, or is aborted, still has a row in step n + 1. That row is
    left out of the draws. What it wrote lies in pages that are free again and are only handed out
    in a later plan, whose step comes later on the device too.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler, self.runner = scheduler, runner
        self.discard()

    def plan(self) -> Plan:
        """Returns the launched step without the requests that have ended since, or a new one."""
        plan, self._launched = self._ahead
        self.discard()
        plan.decodes = [request for request in plan.decodes if not request.finished]
        if plan.decodes:
            return plan
        self._launched = None
        return self.scheduler.plan()

    def compute(self, plan: Plan) -> list[Draw | Exception]:
        """Computes the step, with the one after it under way if that is possible.

        Returns the draws of plan.sampling, and the error of a request that cannot be drawn.
        """
        launched = self._launched or self.runner.launch(plan)
        if self.runner.overlaps and (following := self.scheduler.plan_ahead(plan)) is not None:
            self._ahead = following, self.runner.launch(following, after=launched)
        return self.runner.draws(launched, plan.sampling)

    def discard(self) -> None:
        """Forgets the step that was launched ahead: weights or pages are about to change."""
        self._ahead: tuple[Plan, Any] = Plan(), None
