"""The miniature's tables as constants, read from tables.toml."""

from pathlib import Path

from nanorchestra.files import read_toml

_TABLES = read_toml(Path(__file__).with_suffix(".toml"))

SPECIALISTS = _TABLES["specialists"]  # subject -> the expert that is named after it
SUBJECTS, NOUNS = tuple(SPECIALISTS), _TABLES["nouns"]
KINDS, LESSON_KINDS = _TABLES["kinds"], _TABLES["lesson_kinds"]  # kind of question -> share
FITTING_TOOL = _TABLES["fitting_tool"]  # kind of question -> tool
FIELDS, CHAINS = tuple(_TABLES["fields"]), tuple(map(tuple, _TABLES["chains"]))
ASKED, EASY_RELATIONS = _TABLES["asked"], _TABLES["easy_relations"]

SKILLS, UNSURE, EXPERT_TOKENS = _TABLES["skills"], _TABLES["unsure"], _TABLES["expert_tokens"]
PRICES, LATENCIES = _TABLES["prices"], _TABLES["latencies"]  # what -> range

AVOID_SHARE = _TABLES["avoid_share"]
READING_LESSONS = _TABLES["reading_lessons"]
PREFERENCES = {  # name -> share of the tasks, weights of outcome, cost and latency
    name: (entry["share"], tuple(entry["weights"]))
    for name, entry in _TABLES["preferences"].items()
}
