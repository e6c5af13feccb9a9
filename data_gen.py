"""Makes ToolScale domains and tasks: `python data_gen.py --tasks 10000 --seed 1 --out data/`."""

import sys

if __name__ == "__main__":
    from nanorchestra.errors import end_on_interrupt

    end_on_interrupt("data_gen.py")

import argparse
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import connection, parent_process
from pathlib import Path

from nanorchestra.errors import ArgumentParser, UserError, command, require
from nanorchestra.files import write_whole
from worlds.toolscale.domain import BUILT_IN, build
from worlds.toolscale.generate import claim, make_all, make_batch, report, show
from worlds.toolscale.plan import LEVELS

DESCRIPTION = (
    "Makes domains (databases, tools, policies), and verified multi-step tool-calling tasks in "
    "them. 10,000 tasks take about a minute on two cores."
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, with `levels` and the list of `domains`. Raises UserError."""
    parser = ArgumentParser(prog="data_gen.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--tasks", type=int, default=1000, help="tasks over all domains (1000)")
    add("--seed", type=int, default=0, help="of domains and tasks (0)")
    add("--out", type=Path, help="where tasks.jsonl and worlds/ are written")
    add("--show", type=int, help="print N tasks to read, write nothing")
    add(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="worker processes (one a core); the result does not depend on them",
    )
    add(
        "--domains",
        default=",".join(BUILT_IN),
        help="built-in names, and .py files of your own (all six)",
    )
    add("--difficulty", default="1-5", help="1 to 5, or a range such as 2-4 (1-5)")
    options = parser.parse_args(arguments)
    for name in ("tasks", "workers", "show"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name} is {value}; it must be at least 1")
    first, _, last = options.difficulty.partition("-")
    options.levels = [level for level in LEVELS if first <= str(level) <= (last or first)]
    text = f"--difficulty is {options.difficulty!r}; it must be 1 to 5, or a range such as 2-4"
    require(options.levels and {first, last or first} <= set(map(str, LEVELS)), text)
    options.domains = [name.strip() for name in options.domains.split(",")]
    distinct = len({Path(name).stem for name in options.domains})
    require(distinct == len(options.domains), "--domains must name none twice")
    require(
        options.out or options.show,
        "--out is missing: give a directory, or --show 3 to look at tasks",
    )
    return options


@command("data_gen.py")
def main(arguments: list[str]) -> int:
    """Runs the command line. Returns the exit status."""
    options = parse(arguments)
    try:
        return generate(options)
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written ({error.strerror})") from None


def begin_worker() -> None:
    """Leaves Ctrl-C to the command, which ends its workers, and ends when the command is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def generate(options: argparse.Namespace) -> int:
    """Makes what the options say. Returns the exit status. Raises OSError."""
    started = time.monotonic()
    domains, out, seed = options.domains, options.out, options.seed
    built = [build(domain, seed) for domain in domains]
    if not options.show:
        claim(out, {"seed": seed, "domains": domains, "levels": options.levels})
    make = partial(make_batch, seed, options.levels)
    count = options.show or options.tasks
    wanted = Counter(itertools.islice(itertools.cycle(domains), count))
    if options.show:
        for place, domain in enumerate(domains):
            # The first wishes are of the same kinds in all domains.
            for task in make(domain, 0)["tasks"][place + 1 :][: wanted[domain]]:
                print(show(task))
        return 0
    for domain in built:
        domain.save(out / "worlds" / domain.name)
    pool = ProcessPoolExecutor(options.workers, initializer=begin_worker)
    try:
        tasks, rejected = make_all(wanted, make, seed, pool.map)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    write_whole(out / "tasks.jsonl", "".join(lines))
    print(report(tasks, rejected, time.monotonic() - started))
    if len(tasks) < count:
        print(f"data_gen.py: only {len(tasks)} of {count} tasks could be made", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
