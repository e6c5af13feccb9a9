"""Makes ToolScale worlds and tasks: `python data_gen.py --tasks 10000 --seed 1 --out data/`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("data_gen.py")

import argparse
import json
import os
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import write_whole
from worlds.toolscale.author import write_blueprints
from worlds.toolscale.domains import BUILT_IN, build
from worlds.toolscale.pipeline import claim, make_all, make_batch
from worlds.toolscale.report import report, show

DESCRIPTION = (
    "Makes worlds (databases, tools, policies) and verified multi-step tool-calling tasks in them. "
    "10,000 tasks of the built-in author take about 45 s on two cores. A run that was stopped goes "
    "on with the same command."
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, with `levels` and the list of `domains`. Raises UserError."""
    parser = ArgumentParser(prog="data_gen.py", description=DESCRIPTION)
    add, cores = parser.add_argument, os.cpu_count() or 1
    add("--tasks", type=int, default=1000, metavar="N", help="tasks over all domains (1000)")
    add("--seed", type=int, default=0, help="of worlds and tasks (0)")
    add("--out", type=Path, metavar="DIR", help="where tasks.jsonl and worlds/ are written")
    add("--show", type=int, metavar="N", help="print N tasks to read, write nothing")
    text = "worker processes (one a core); the result does not depend on them"
    add("--workers", type=int, default=cores, metavar="N", help=text)
    text = "built-in names or blueprint files (all ten); with --author llm, any words"
    add("--domains", default=",".join(BUILT_IN), metavar="A,B", help=text)
    text = "1 to 5, or a range such as 2-4 (1-5)"
    add("--difficulty", default="1-5", metavar="LEVELS", help=text)
    text = "who writes: builtin (the default) needs no network"
    add("--author", choices=("builtin", "llm"), default="builtin", help=text)
    text = "with --author llm: the base URL of an OpenAI-compatible server"
    add("--endpoint", metavar="URL", help=text)
    text = "with --author llm: the model to ask for (gpt-5)"
    add("--model", default="gpt-5", metavar="NAME", help=text)
    options = parser.parse_args(arguments)
    for name in ("tasks", "workers", "show"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} is {value}; it must be at least 1")
    low, _, high = options.difficulty.partition("-")
    levels = "12345"[: "12345".find(high or low) + 1]["12345".find(low) :]
    text = f"--difficulty is {options.difficulty!r}; it must be 1 to 5, or a range such as 2-4"
    require(low and levels, text)
    options.levels = [int(level) for level in levels]
    options.domains = [name.strip() for name in options.domains.split(",")]
    distinct = len({Path(name).stem for name in options.domains})
    require(distinct == len(options.domains), "--domains must name none twice")
    llm = options.author == "llm"
    require(llm == bool(options.endpoint), "--author llm needs --endpoint, and --endpoint needs it")
    missing = not options.out and (llm or not options.show)
    require(not missing, "--out is missing: give a directory, or --show 3 to look at tasks")
    return options


@command("data_gen.py")
def main(arguments: list[str]) -> int:
    """Runs the command line. Returns the exit status."""
    options, started = parse(arguments), time.monotonic()
    domains, llm = options.domains, options.author == "llm"
    if not options.show:
        names = ("seed", "domains", "levels", "author")
        claim(options.out, {name: getattr(options, name) for name in names})
    if llm:
        home = options.out / "blueprints"
        domains = write_blueprints(domains, home, options.endpoint, options.model, options.seed)
    worlds = {domain: build(domain, options.seed)[0] for domain in domains}
    make = partial(make_batch, options.seed, options.levels)
    count = options.show or options.tasks
    share, more = divmod(count, len(domains))
    wanted = {domain: share + (place < more) for place, domain in enumerate(domains)}
    if options.show:
        for place, domain in enumerate(domains):
            # The first wishes are of the same kinds in all domains.
            for task in make(domain, 0)["tasks"][place + 1 :][: wanted[domain]]:
                print(show(worlds[domain], task))
        return 0
    for world in worlds.values():
        world.save(options.out / "worlds" / world.domain)
    # Ctrl-C is for this process; it ends the workers.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(options.workers, initializer=signal.signal, initargs=ignore)
    try:
        tasks, total = make_all(wanted, make, options.out, pool.map)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    write_whole(options.out / "tasks.jsonl", "".join(lines))
    shutil.rmtree(options.out / "parts")
    print(report(tasks, total, worlds, time.monotonic() - started))
    if len(tasks) < count:
        print(f"data_gen.py: only {len(tasks)} of {count} tasks could be made", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
