"""The forms of the files that users write: tau2's tasks, rows with experts, a domain's blueprint.

docs/toolscale.md describes them. tau2's tasks may hold more than stands here.
"""

from typing import Annotated, Any, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.records import Json
from nanorchestra.validation import Number, Text

Texts = Annotated[list[Text], Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^\w+$")]
Positive = Annotated[Number, Field(gt=0)]
Draw = Annotated[list[Any], Field(min_length=1)]  # a kind of draw, and its arguments


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
    unknown_info: str | None


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
    check: Literal["before", "confirmed", "never"]
    args: Json


class Order(TypedDict):
    """Calls of `first` come before those of `then`."""

    first: list[str]
    then: list[str]


class Calls(TypedDict, total=False):
    """Calls of these tools, with these arguments."""

    tools: Required[list[str]]
    where: Json


RULES = {"before": Order, "confirmed": Calls, "never": Calls}


class TaskForm(TypedDict, total=False):
    """A line of tasks.jsonl."""

    id: Required[str]
    domain: Required[Name]
    tools: list[str]
    user_scenario: Required[Spoken]
    rules: list[Rule]
    evaluation_criteria: Required[Scored]


# --- a domain


class Table(TypedDict, total=False):
    """A table, and how its records are drawn."""

    key: Required[Text]
    prefix: Required[str]
    digits: Annotated[int, Field(ge=3, le=10)]
    rows: list[Json]
    count: Required[Annotated[int, Field(ge=1)]]
    fields: Required[Json]


class Identify(TypedDict):
    """How the user is found."""

    call: Text
    known: Texts
    id: Texts
    unknown: Texts


class Story(TypedDict):
    """What the user tells beside the wishes."""

    say: Texts
    moods: Texts


class ToolForm(TypedDict):
    """A tool; the type of an argument is a list of values, or as "string: what it is"."""

    kind: Literal["read", "write", "calculate", "handover"]
    description: Text
    arguments: dict[
        str,
        Texts | Annotated[str, Field(pattern="^(string|integer|number|boolean|array)(: .+)?$")],
    ]
    program: Texts


class Precondition(TypedDict, total=False):
    """A rule of the policy."""

    text: Required[Text]
    test: Text
    check: Text
    args: Json


class Fact(TypedDict, total=False):
    """What the user makes a wish depend on."""

    test: Required[Text]
    say: Required[Texts]
    limit: tuple[Text, Positive]


Prefer = TypedDict("Prefer", {"test": Text, "instead": Text, "else": Texts})
Ref = TypedDict(
    "Ref",
    {
        "in": Text,
        "list": Text,
        "tail": Text,
        "own": Text,
        "id": Text,
        "by": Required[Texts],
        "find": Required[Texts],
        "unknown": Text,
        "again": Text,
        "listed": bool,
    },
    total=False,
)
WishForm = TypedDict(
    "WishForm",
    {
        "it": Text,
        "where": Text,
        "can": Text,
        "with": dict[str, Draw],
        "rules": Texts,
        "reads": Texts,
        "do": Texts,
        "say": Required[Texts],
        "no": Texts,
        "to": Texts,
        "or": Annotated[dict[str, Texts], Field(min_length=1)],
        "facts": list[Fact],
        "prefers": list[Prefer],
        "all": Fact,
        "tell": list[tuple[list[Text], Text]],
        "weight": Positive,
        "last": bool,
    },
    total=False,
)


class Blueprint(TypedDict, total=False):
    """A domain: domains/NAME.json."""

    domain: Required[Name]
    business: Required[Text]
    held_out: bool
    choices: dict[str, Draw]
    days: dict[str, Text]
    policy: Required[list[str]]
    tables: Required[Annotated[dict[str, Table], Field(min_length=1)]]
    identify: Required[Identify]
    refs: Required[dict[str, Ref]]
    stories: dict[str, Story]
    tools: Required[Annotated[dict[str, ToolForm], Field(min_length=1)]]
    rules: Required[dict[str, Precondition]]
    wishes: Required[Annotated[dict[str, WishForm], Field(min_length=3)]]
