"""The forms of the files that users write: tau2's tasks, and rows with experts.

docs/worlds.md describes them. tau2's tasks may hold more than stands here.
"""

from typing import Annotated, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.records import Json
from nanorchestra.validation import Text

Name = Annotated[str, Field(pattern=r"^\w+$")]


# --- tasks


class Action(TypedDict, total=False):
    """A golden call."""

    name: Required[str]
    arguments: Required[Json]
    requestor: Literal["assistant", "user"]
    compare_args: list[str] | None


Basis = Literal["DB", "ACTION", "COMMUNICATE", "ENV_ASSERTION", "NL_ASSERTION"]


class Criteria(TypedDict, total=False):
    """What a task is scored by."""

    actions: list[Action] | None
    communicate_info: list[str] | None
    nl_assertions: list[str] | None
    reward_basis: Annotated[list[Basis], Field(min_length=1)] | None


class Wanted(TypedDict, total=False):
    """Parts of what the user wants."""

    domain: str | None
    reason_for_call: str | None
    task_instructions: str | None


class Scenario(TypedDict):
    """What the user wants: a text, or parts of one."""

    instructions: str | Wanted


class Tau2(TypedDict):
    """A task of tau2-bench."""

    id: str | int
    user_scenario: Scenario
    evaluation_criteria: Criteria | None


class Row(TypedDict, total=False):
    """A row of a file: a task of ours has a domain."""

    domain: str
    category: Literal["qa", "func_call"]


class Offer(TypedDict):
    """The experts of a row that the published orchestrator was trained on."""

    model_mapping: Json
    tools: list[Json]
    tool_pricing: Json
    pref_vec: Json


class Parts(TypedDict, total=False):
    """What the scripted user says."""

    reason_for_call: Required[Text]
    known_info: str | None


class Spoken(TypedDict):
    """The scenario of a task of ours."""

    instructions: Parts


class Scored(Criteria, total=False):
    """The criteria of a task of ours."""

    actions: Required[list[Action]]
    communicate_info: Required[list[str]]
    reward_basis: Required[Annotated[list[Basis], Field(min_length=1)]]


class Rule(TypedDict):
    """A rule that no tool enforces; `args` are in the form that RULES has for its check."""

    text: str
    check: Literal["before", "confirmed", "made"]
    args: Json


class Order(TypedDict):
    """Calls of `first` come before those of `then`."""

    first: list[str]
    then: list[str]


class Calls(TypedDict):
    """Calls of these tools."""

    tools: list[str]


RULES = {"before": Order, "confirmed": Calls, "made": Calls}


class TaskForm(TypedDict, total=False):
    """A line of tasks.jsonl."""

    id: Required[str]
    domain: Required[Name]
    tools: list[str]
    user_scenario: Required[Spoken]
    rules: list[Rule]
    evaluation_criteria: Required[Scored]
