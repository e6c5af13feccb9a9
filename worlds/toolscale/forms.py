"""The form of a line of tasks.jsonl, as docs/worlds.md describes it; it may hold more."""

from typing import Annotated, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.records import Json
from nanorchestra.validation import Text

Name = Annotated[str, Field(pattern=r"^\w+$")]


class Action(TypedDict, total=False):
    """A golden call."""

    name: Required[str]
    arguments: Required[Json]
    requestor: Literal["assistant", "user"]
    compare_args: list[str] | None


Basis = Literal["DB", "ACTION", "COMMUNICATE", "ENV_ASSERTION", "NL_ASSERTION"]


class Scored(TypedDict, total=False):
    """What a task is scored by."""

    actions: Required[list[Action]]
    communicate_info: Required[list[str]]
    nl_assertions: list[str] | None
    reward_basis: Required[Annotated[list[Basis], Field(min_length=1)]]


class Parts(TypedDict, total=False):
    """What the scripted user says."""

    reason_for_call: Required[Text]
    known_info: str | None


class Spoken(TypedDict):
    """The scenario of a task."""

    instructions: Parts


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
