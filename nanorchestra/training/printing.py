"""What a training run prints: lines beside a progress bar, on one rank."""

from tqdm import tqdm

from nanorchestra.schemas import Json
from nanorchestra.training.distributed import Ranks
from nanorchestra.units import decimal, dollars, is_graded, percent, seconds

WARM_START_LINES = 20  # steps of a warm start from one printed line to the next


def say(ranks: Ranks, text: str) -> None:
    """Prints a line beside the progress bar."""
    if ranks.first:
        tqdm.write(text)


def progress_bar(ranks: Ranks, total: int, label: str, done: int = 0, unit: str = "step") -> tqdm:
    """Returns a progress bar; it is shown on a terminal only, with parts of a unit."""
    disable = None if ranks.first else True
    options = {"unit": unit, "unit_scale": True, "disable": disable}
    return tqdm(total=total, initial=done, desc=label, **options)


def step_line(row: Json, steps: int) -> str:
    """Returns the line of a step from its row of metrics.jsonl, "" for one without a line."""
    speed = f"{row['tokens_per_s']:,.0f} tokens/s"
    if row["phase"] == "warm_start":
        if row["step"] % WARM_START_LINES:
            return ""
        return f"warm start step {row['step']:4d}/{steps}  loss {row['loss']:.3f}  {speed}"
    outcome = f"right {percent(row['accuracy'])}"
    if is_graded(row):
        outcome = f"outcome {decimal(row['accuracy'])}  exact {percent(row['exact'])}"
    line = (
        f"step {row['step']:4d}/{steps}  reward {row['reward']:.3f}  "
        f"{outcome}  cost {dollars(row['cost_usd'])}  time {seconds(row['latency_s'])}  "
        f"preference {row['preference']:.3f}  {speed}"
    )
    if "loss" not in row:
        reasons = ", ".join(row["filtered"]) or "nothing was sampled"
        line += f"  no update: no group has an advantage ({reasons})"
    return line
