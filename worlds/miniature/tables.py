"""The miniature's tables as constants, read from tables.toml and phrases.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TRAIN, HELD_OUT = "train", "held_out"

Range = tuple[int, int]
Phrases = dict[str, dict[str, list[str]]]  # split -> kind -> phrases


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_TABLES, _PHRASES = _read("tables.toml"), _read("phrases.toml")

SUBJECTS: tuple[str, ...] = tuple(_TABLES["subjects"])
KINDS: dict[str, float] = _TABLES["kinds"]
LESSON_KINDS: dict[str, float] = _TABLES["lesson_kinds"]
FITTING_TOOL: dict[str, str] = _TABLES["fitting_tool"]
EXPERT_NAMES: list[str] = _TABLES["expert_names"]
TOOL_NAMES: dict[str, list[str]] = _TABLES["tool_names"]
FIELDS: tuple[str, ...] = tuple(_TABLES["fields"])
CHAINS: tuple[tuple[str, ...], ...] = tuple(map(tuple, _TABLES["chains"]))
ASKED_SUBJECTS: list[str] = _TABLES["asked_subjects"]
EASY_RELATIONS: list[str] = _TABLES["easy_relations"]

SKILLS: dict[str, dict[str, tuple[float, float]]] = _TABLES["skills"]
UNSURE: dict[str, tuple[float, float]] = _TABLES["unsure"]
EXPERT_TOKENS: dict[str, tuple[int, int]] = _TABLES["expert_tokens"]
PRICES: dict[str, tuple[Range, Range, float]] = _TABLES["prices"]
LATENCIES: dict[str, tuple[Range, Range, float]] = _TABLES["latencies"]
EXPENSIVE_CENTS: int = _TABLES["expensive_cents"]
SLOW_SECONDS: int = _TABLES["slow_seconds"]

AVOID_SHARE: float = _TABLES["avoid_share"]
PREFERENCES: dict[str, tuple[float, tuple[float, float, float]]] = {
    name: (entry["share"], tuple(entry["weights"]))
    for name, entry in _TABLES["preferences"].items()
}
PHRASES: Phrases = _PHRASES["preferences"]
QUESTIONS: Phrases = _PHRASES["questions"]
