"""Makes ToolScale domains and tasks.

    python data_gen.py --tasks 10000 --seed 1 --out data/
    python data_gen.py --out data/said --endpoint MODEL@URL --solver MODEL@URL --max-usd 20
    python data_gen.py --domain "a library that lends instruments" --endpoint MODEL@URL

A language model, where one is named, says the tasks in other words, tries how hard they are, or
writes a domain. What it replies is kept, so the same command goes on where it was stopped.
"""

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

from nanorchestra.agent.failures import EndpointError
from nanorchestra.agent.numbering import in_attempt
from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import write_whole
from nanorchestra.schemas import Json
from nanorchestra.tools.replies import ReplyStore
from nanorchestra.tools.sandbox import Sandbox
from nanorchestra.tools.spending import Spending
from nanorchestra.units import dollars, percent
from worlds.toolscale.domain import BUILT_IN, Domain, build
from worlds.toolscale.generate import WAYS, make_all, report, show, tasks_of_wish, why
from worlds.toolscale.plan import LEVELS

DESCRIPTION = (
    "Makes domains (databases, tools, policies), and verified multi-step tool-calling tasks in "
    "them. 10,000 tasks take about a minute."
)
REPLIES = Path("runs") / "replies"  # of language models, as evaluate.py keeps them
MODELS = ("endpoint", "solver")  # options that name one


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, with `levels` and the list of `domains`. Raises UserError."""
    parser = ArgumentParser(prog="data_gen.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--tasks", type=int, default=1000, help="tasks over all domains (1000)")
    add("--seed", type=int, default=0, help="of domains and tasks (0)")
    add("--out", type=Path, help="where tasks.jsonl and worlds/ are written")
    add("--show", type=int, help="print N tasks to read, write nothing")
    add("--wish", help="of --show: tasks of the wish of this name alone, in each way to put it")
    add(
        "--domains",
        default=",".join(BUILT_IN),
        help="built-in names, and .py files of your own (all six)",
    )
    add("--difficulty", default="1-5", help="1 to 5, or a range such as 2-4 (1-5)")
    add("--endpoint", help="MODEL@URL, which says the tasks in other words, or writes a --domain")
    add("--domain", help="words for a domain, whose file is written to --out FILE.py")
    add("--solver", help="MODEL@URL; tasks that it never solves in eight attempts are dropped")
    add("--max-usd", type=float, default=math.inf, help="that endpoints may cost together")
    options = parser.parse_args(arguments)
    for name in ("tasks", "show"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} is {value}; it must be at least 1")
    first, _, last = options.difficulty.partition("-")
    options.levels = [level for level in LEVELS if first <= str(level) <= (last or first)]
    text = f"--difficulty is {options.difficulty!r}; it must be 1 to 5, or a range such as 2-4"
    require(options.levels and {first, last or first} <= set(map(str, LEVELS)), text)
    options.domains = [name.strip() for name in options.domains.split(",")]
    distinct = len({Path(name).stem for name in options.domains})
    require(distinct == len(options.domains), "--domains must name none twice")
    for name in MODELS:
        model = getattr(options, name) or "MODEL@http://URL"
        right = f"--{name} is {model!r}; it must be MODEL@ and a base URL, http:// or https://"
        require(re.match(r"[^@\s]+@https?://\S+$", model), right)
    require(not options.wish or options.show, "--wish is of --show N, which is missing")
    asked = [f"--{name}" for name in MODELS if getattr(options, name)]
    require(
        not options.wish or not asked, f"--wish shows plain tasks; leave out {', '.join(asked)}"
    )
    require(not options.domain or options.endpoint, "--domain needs the --endpoint that writes it")
    require(
        options.out or options.show or options.domain,
        "--out is missing: give a directory, or --show 3 to look at tasks",
    )
    return options


@command("data_gen.py")
def main(arguments: list[str]) -> int:
    """Runs the command line. Returns the exit status."""
    options = parse(arguments)
    try:
        return write_domain(options) if options.domain else generate(options)
    except EndpointError as error:
        raise UserError(f"{error}; the same command goes on") from None
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written ({error.strerror})") from None


def generate(options: argparse.Namespace) -> int:
    """Makes what the options say. Returns the exit status. Raises OSError."""
    started = time.monotonic()
    domains, out, seed = options.domains, options.out, options.seed
    built = [build(domain, seed) for domain in domains]
    if not options.show:
        present = f"--out {out}: has tasks already; give another directory"
        require(not (out / "tasks.jsonl").exists(), present)
    if options.wish:
        return show_wish(options, built)
    count = options.show or options.tasks
    tasks, thrown = make_all(built, count, seed, options.levels)
    if options.show:
        for task in refined(options, built, tasks):
            print(show(task))
        return 0
    for domain in built:
        domain.save(out / "worlds" / domain.name)
    print(report(tasks, thrown, time.monotonic() - started))
    refined_tasks = refined(options, built, tasks)
    lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in refined_tasks)
    write_whole(out / "tasks.jsonl", "".join(lines))
    if len(tasks) < count:
        print(f"data_gen.py: only {len(tasks)} of {count} tasks could be made", file=sys.stderr)
        return 1
    return 0


def show_wish(options: argparse.Namespace, domains: list[Domain]) -> int:
    """Prints tasks of one wish, and why others were thrown away. Returns 1 if none is proved."""
    having = [domain for domain in domains if options.wish in domain.wishes]
    known = "; ".join(f"{domain.name} has {', '.join(domain.wishes)}" for domain in domains)
    require(having, f"--wish {options.wish}: {known}")
    shown = 0
    for domain in having:
        tasks, thrown = tasks_of_wish(domain, options.wish, options.show, options.seed, WAYS)
        shown += len(tasks)
        for task in tasks:
            print(show(task))
        if thrown:
            print(f"{domain.name}.{options.wish}: thrown away: {why(thrown)}", file=sys.stderr)
    return 0 if shown else 1


def refined(options: argparse.Namespace, domains: list[Domain], tasks: list[Json]) -> list[Json]:
    """Returns the tasks as the language models of the options leave them; prints what they did.

    Without such a model they are as they were. Raises EndpointError, UserError.
    """
    if not options.endpoint and not options.solver:
        return tasks
    from worlds.toolscale import refine  # brings torch, which takes seconds

    by_name = {domain.name: domain for domain in domains}
    spent = options.out and options.out / "spent.json"
    spending = Spending(options.max_usd, ReplyStore(REPLIES, tools=False), spent)
    try:
        if options.endpoint:
            expert = refine.language_model(options.endpoint, "--endpoint", "texts", spending)
            for outcome, number in refine.reword(by_name, tasks, expert).most_common():
                print(f"  {number:6d}  {outcome}")
        if options.solver:
            solver = refine.endpoint(options.solver, "--solver")
            shares = refine.solved(by_name, tasks, solver, spending)
            for task, share in zip(tasks, shares, strict=True):
                task["solved"] = share
            kept = [task for task in tasks if task["solved"]]
            none = f"--solver {options.solver}: solves none of {len(tasks)} tasks"
            require(kept, none)
            share = percent(sum(task["solved"] for task in kept) / len(kept))
            print(f"solved: {len(kept)} of {len(tasks)} tasks are kept, {share} of their attempts")
            tasks = kept
    finally:
        print_bill(spending)
    return tasks


def print_bill(spending: Spending) -> None:
    """Prints what endpoints were paid."""
    parts = ", ".join(f"{name} {dollars(usd)}" for name, usd in spending.bill.most_common())
    if parts:
        print(f"paid to endpoints: {dollars(sum(spending.bill.values()))} ({parts})")


def write_domain(options: argparse.Namespace) -> int:
    """Has a language model write a domain's file, prints it, and keeps it. Returns 0. UserError."""
    from worlds.toolscale import draft_domain, refine  # bring torch, which takes seconds

    name = re.sub(r"\W+", "_", options.domain.casefold()).strip("_")
    out = options.out or Path(f"{name}.py")
    require(out.suffix == ".py", f"--out {out}: a domain is a file NAME.py")
    require(not out.exists(), f"--out {out}: is there already; give another file")
    spending = Spending(options.max_usd, ReplyStore(REPLIES, tools=False))
    expert = refine.language_model(options.endpoint, "--endpoint", "domain", spending)
    with Sandbox(1, [draft_domain.__name__]) as sandbox, in_attempt(options.seed):
        source, problem = draft_domain.draft(options.domain, expert, sandbox)
    print_bill(spending)
    kept = out.with_suffix(".part.py") if problem else out
    if source:  # a reply that failed leaves an earlier draft as it is
        write_whole(kept, source)
    has = (
        f"{kept} has what is written; another --seed asks anew" if source else "nothing is written"
    )
    require(not problem, f"{options.domain!r}: {problem}. {has}")
    print(f"{out}: read it, then try it: python data_gen.py --domains {out} --show 5")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
