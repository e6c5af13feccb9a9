"""The plots of a report: kernels as shares of their ceilings, and decoding beside its ceiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: dict[str, Any], stem: Path) -> list[Path]:
    """Draws what the figures allow. Returns the files."""
    figures = {name: part.get("figures", {}) for name, part in results.items()}
    drawn = []
    shares = {
        name: row["share"]
        for part in figures.values()
        for name, row in part.items()
        if "share" in row
    }
    if shares:
        figure, axis = plt.subplots(figsize=(8, 0.3 * len(shares) + 1))
        axis.barh(list(shares), [100 * share for share in shares.values()], color="#4878a8")
        axis.axvline(100, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_xlabel("share of the ceiling measured on this card, %")
        drawn.append(_saved(figure, stem, "kernels"))
    speeds: dict[str, dict[int, float]] = {}
    for name, part in (("engine", "decode"), ("transformers", "decode"), ("vLLM", "vllm")):
        for row, values in figures.get(part, {}).items():
            peer, _, batch = row.rpartition("B=")
            if bool(peer) == (name == "transformers") and "tokens_per_second" in values:
                speeds.setdefault(name, {})[int(batch)] = values["tokens_per_second"]
                if "ceiling_tokens_per_second" in values:
                    ceiling = values["ceiling_tokens_per_second"]
                    speeds.setdefault("ceiling", {})[int(batch)] = ceiling
    if speeds:
        figure, axis = plt.subplots(figsize=(6, 4))
        for name, points in speeds.items():
            style = "--" if name == "ceiling" else "o-"
            axis.plot(list(points), list(points.values()), style, label=name)
        axis.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s")
        axis.legend()
        drawn.append(_saved(figure, stem, "decode"))
    return drawn


def _saved(figure: Any, stem: Path, name: str) -> Path:
    path = stem.with_name(f"{stem.name}-{name}.png")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
