"""The form of a catalogue: what each kind of tool, an expert and an endpoint may state.

docs/tools.md describes the settings. What an entry leaves out has the default of its tool.
"""

from typing import Annotated, Any, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from nanorchestra.validation import Count, Number, Seconds, Text, Usd, unshown

Name = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
Flag = Annotated[bool, Field(strict=True)]
Variable = Annotated[
    str,
    Field(pattern=r"^([A-Za-z_]\w*)?$"),
    unshown("the name of an environment variable, or empty"),
]
Header = Annotated[
    str,
    Field(pattern=r"^\$[A-Za-z_]\w*$"),
    unshown("'$NAME' with the name of an environment variable"),
]
Headers = dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Header]
Url = Annotated[
    str,
    Field(pattern=r"^https?://[^\s@?#]+$"),
    unshown("http:// or https://, a host and a path, without a key or a query"),
]


class File(TypedDict, total=False):
    """One file of a catalogue. Entries are checked one by one, tables after they are merged."""

    tools: list[dict[str, Any]]
    experts: dict[str, dict[str, Any]]
    endpoints: dict[str, dict[str, Any]]
    aliases: dict[str, Text]
    max_usd: Usd  # of a run


class EndpointEntry(TypedDict, total=False):
    """An OpenAI-compatible server."""

    base_url: Required[Url]
    key_variable: Variable
    headers: Headers
    timeout_s: Seconds
    concurrency: Count


class ExpertEntry(TypedDict, total=False):
    """A language model; `usd` is per million tokens: input, output."""

    endpoint: Required[Text]
    model: Required[Text]
    usd: Required[tuple[Usd, Usd]]
    reasoning: Flag
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    temperature: Annotated[Number, Field(ge=0, le=2)]
    max_tokens: Count
    task_usd: Annotated[Usd, Field(gt=0)]  # that a task of NAME+tools may cost
    code_tokens: Count
    context_tokens: Count
    boxed: Flag
    note: Text
    owner: Text
    open_weights: Flag
    latency_s: Seconds


class ToolEntry(TypedDict, total=False):
    """What every kind of tool may state."""

    name: Required[Name]
    description: Required[Text]


class Code(ToolEntry, total=False):
    """The interpreter."""

    usd_per_call: Usd
    usd_per_second: Usd
    timeout_s: Seconds


class Search(ToolEntry, total=False):
    """Search in a corpus: a JSONL file of {"text"}, an index, or the address of a search server."""

    corpus: Required[Text]
    passages: Annotated[int, Field(strict=True, ge=1, le=1000)]
    usd_per_call: Usd


class Web(ToolEntry, total=False):
    """Search in the web."""

    pages: Annotated[int, Field(strict=True, ge=1, le=20)]
    usd_per_call: Usd
    timeout_s: Seconds
    base_url: Url


class OneExpert(ToolEntry, total=False):
    """An expert as a tool, by its name in the table of experts."""

    expert: Required[Text]


class Role(ToolEntry, total=False):
    """A published role; `parameters` are those of the published file."""

    name: Required[Literal["enhance_reasoning", "search", "answer"]]
    models: Annotated[list[Text], Field(min_length=1)]
    parameters: dict[str, Any]


class Server(TypedDict, total=False):
    """What an MCP server may state; its tools are named NAME_TOOL."""

    name: Required[Name]
    only: Annotated[list[Text], Field(min_length=1)]
    usd_per_call: Usd
    timeout_s: Seconds


class Program(Server, total=False):
    """An MCP server that is started: a program, its arguments, and variables that it is given."""

    command: Required[
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1),
            unshown("a list of texts: the program and its arguments"),
        ]
    ]
    env: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]],
        unshown("a list of names of environment variables"),
    ]


class Address(Server, total=False):
    """An MCP server at an address."""

    url: Required[Url]
    key_variable: Variable
    headers: Headers


class Decorated(TypedDict, total=False):
    """What @tool may state of a function."""

    kind: Literal["function", "search", "code"]
    usd_per_call: Usd
    timeout_s: Seconds


KINDS = {
    "code": Code,
    "search": Search,
    "web": Web,
    "expert": OneExpert,
    "role": Role,
    "mcp": Program,  # or Address, with a url
}
