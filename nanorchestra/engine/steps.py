"""Two ways to run the engine's steps: one after the other, or with the next one launched ahead.

`SerialSteps` plans a step when the last one's tokens are known. `OverlappedSteps` launches the next
step before it reads this one's tokens, so that a GPU computes while the host works: the tokens go
from one step to the next on the device. Both give the same tokens; the tests hold them against
each other.
"""

from typing import Any

from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw
from nanorchestra.engine.scheduler import Plan, Scheduler


class SerialSteps:
    """Plans a step, computes it and reads its draws."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler, self.runner = scheduler, runner

    def plan(self) -> Plan:
        """Returns the step to compute next."""
        return self.scheduler.plan()

    def compute(self, plan: Plan) -> list[Draw]:
        """Computes the step. Returns the draws of plan.sampling."""
        return self.runner.draws(self.runner.launch(plan), plan.sampling)

    def discard(self) -> None:
        """Forgets what was launched ahead: nothing."""


class OverlappedSteps:
    """As SerialSteps, but launches step n + 1 before it reads the draws of step n.

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

    def compute(self, plan: Plan) -> list[Draw]:
        """Launches `plan` if it is not, launches the step after it if it can, and reads `plan`."""
        launched = self._launched or self.runner.launch(plan)
        if (following := self.scheduler.plan_ahead(plan)) is not None:
            self._ahead = following, self.runner.launch(following, after=launched)
        return self.runner.draws(launched, plan.sampling)

    def discard(self) -> None:
        """Forgets the step that was launched ahead: weights or pages are about to change."""
        self._ahead: tuple[Plan, Any] = Plan(), None
