"""A domain: its database as every task finds it, its tools, its policy, and what its users wish.

A domain is made of its file and a seed. A directory of tasks holds all that plays them:

    DIR/domain.py    the file
    DIR/db.json      the records
    DIR/policy.md    the rules in words
"""

import importlib
import inspect
import re
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from nanorchestra.errors import require
from nanorchestra.files import import_file, own_code, read_text, write_whole
from nanorchestra.schemas import Json
from worlds.toolscale.toolkit import Draw, Toolkit
from worlds.toolscale.wishes import Rule, WishKind

HOME = Path(__file__).with_name("domains")
BUILT_IN = sorted(path.stem for path in HOME.glob("*.py") if path.stem != "__init__")
IDENTIFY = "Find out who the user is with {} before you change anything."
CONFIRM = (
    "Before each change name the values that you are going to give to the tool, keys too, and wait "
    "for the user's yes."
)
LOOK = "Look up what a wish is about before you do it or refuse it."
REFUSE = (
    "Refuse what a rule or a tool forbids: say so, and hand nobody over for it. Hand over only a "
    "user who wants to speak with a person, when all else is done."
)


@dataclass
class Domain:
    """A database as every task of the domain finds it, and what can be done with it.

    `start` has the tools: `kinds()`, `functions()`, `tables`, `copy()` and `call()`, as Toolkit
    does. `source` is the module of the domain's file; None for a domain of others.
    """

    name: str
    start: Any
    policy: str
    source: ModuleType | None = None

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each tool: "read", "write" or "handover"."""
        return self.start.kinds()

    @cached_property
    def functions(self) -> dict[str, Json]:
        """The OpenAI function objects by the names of the tools."""
        return {each["function"]["name"]: each for each in self.start.functions()}

    def of_kind(self, kind: str) -> list[str]:
        """Returns the names of the tools of a kind."""
        return [name for name, own in self.kinds.items() if own == kind]

    @property
    def people(self) -> list[str]:
        """The keys of the users."""
        return list(self.start.tables[0])

    @property
    def held_out(self) -> bool:
        """Whether no task of the domain is trained on."""
        return getattr(self.source, "HELD_OUT", False)

    @cached_property
    def rules(self) -> list[str]:
        """The texts of the rules that no tool enforces."""
        return [each.text for each in vars(self.source).values() if isinstance(each, Rule)]

    @cached_property
    def wishes(self) -> dict[str, WishKind]:
        """The kinds of wishes by their names."""
        named = vars(self.source).items()
        return {name: kind for name, kind in named if isinstance(kind, WishKind)}

    def identify(self, person: Any) -> tuple[str, tuple]:
        """Returns what a user says of itself, and the call that finds it."""
        return self.source.identify(person)

    def save(self, directory: Path) -> None:
        """Writes the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.source.__file__, directory / "domain.py")
        write_whole(directory / "db.json", _adapter(self.source).dump_json(self.start, indent=1))
        write_whole(directory / "policy.md", self.policy)


def build(name: str, seed: int, split: str = "") -> Domain:
    """Returns a built-in domain, or that of a .py file, with the records of a seed and a split.

    The split is that of the domain if it is not given. UserError for an unknown or a broken one.
    """
    if name.endswith(".py"):
        source, name = _load(Path(name)), Path(name).stem
    else:
        known = ", ".join(BUILT_IN)
        require(name in BUILT_IN, f"domain {name!r}: there are {known}, and files NAME.py")
        source = importlib.import_module(f"worlds.toolscale.domains.{name}")
    file = source.__file__
    return own_code(lambda: of_module(source, name, seed, split), file, file)


def of_module(source: ModuleType, name: str, seed: int, split: str = "") -> Domain:
    """Returns the domain of a file's module, as `build` does. Raises what the file raises."""
    split = split or ("held_out" if getattr(source, "HELD_OUT", False) else "train")
    domain = Domain(name, source.draw(Draw(f"{seed}/{name}", split)), "", source)
    return replace(domain, policy=_policy(domain))


def load(directory: Path) -> Domain:
    """Reads a directory that `save` wrote. Raises UserError for a file that is missing."""
    source = _load(directory / "domain.py")
    start = _adapter(source).validate_json(read_text(directory / "db.json"))
    return Domain(directory.name, start, read_text(directory / "policy.md"), source)


def _load(path: Path) -> ModuleType:
    """The module of a file. Raises UserError with its line."""
    require(path.is_file(), f"{path}: no such file")
    kind = "domain_" + re.sub(r"\W", "_", str(path.resolve().parent))  # many files are domain.py
    source = own_code(lambda: import_file(path, kind), str(path), str(path))
    own_code(lambda: _toolkit(source), str(path), str(path))
    return source


def _toolkit(source) -> type[Toolkit]:
    """The class of a domain's file that has its tables and tools."""
    own = [each for each in vars(source).values() if inspect.isclass(each)]
    (kit,) = [each for each in own if issubclass(each, Toolkit) and each is not Toolkit]
    return kit


def _adapter(source) -> TypeAdapter:
    return TypeAdapter(_toolkit(source))


def _policy(domain) -> str:
    """The policy: who the agent is, the day, and the rules."""
    start = domain.start
    _, (identify, *_) = domain.identify(next(iter(start.tables[0].values())))
    listed = [IDENTIFY.format(identify), CONFIRM, LOOK, REFUSE, *domain.rules]
    lines = [introduction(start), "", *(f"- {each}" for each in listed)]
    return "\n".join(lines) + "\n"


def introduction(start: Toolkit) -> str:
    """Returns the first words of a policy: who the agent is, and the day."""
    return f"{' '.join(inspect.getdoc(start).split())} Today is {start.today}."
