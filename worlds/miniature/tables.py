"""The miniature's tables as constants, read from tables.toml and phrases.toml."""

from pathlib import Path

from nanorchestra.files import read_toml

_TABLES = read_toml(Path(__file__).with_suffix(".toml"))
_PHRASES = read_toml(Path(__file__).with_name("phrases.toml"))

TRAIN, HELD_OUT = "train", "held_out"  # the splits
SPECIALISTS = _TABLES["specialists"]  # subject -> the expert that is named after it
SUBJECTS, NOUNS = tuple(SPECIALISTS), _TABLES["nouns"]
KINDS, LESSON_KINDS = _TABLES["kinds"], _TABLES["lesson_kinds"]  # kind of question -> share
FITTING_TOOL = _TABLES["fitting_tool"]  # kind of question -> tool
CONSONANTS, VOWELS = _TABLES["consonants"], _TABLES["vowels"]
FIELDS, CHAINS = tuple(_TABLES["fields"]), tuple(map(tuple, _TABLES["chains"]))
ASKED, EASY_RELATIONS = _TABLES["asked"], _TABLES["easy_relations"]

SKILLS, UNSURE, EXPERT_TOKENS = _TABLES["skills"], _TABLES["unsure"], _TABLES["expert_tokens"]
PRICES, LATENCIES = _TABLES["prices"], _TABLES["latencies"]  # what -> range

AVOID_SHARE = _TABLES["avoid_share"]
PREFERENCES = {  # name -> share of the tasks, weights of outcome, cost and latency
    name: (entry["share"], tuple(entry["weights"]))
    for name, entry in _TABLES["preferences"].items()
}
PHRASES, QUESTIONS = _PHRASES["preferences"], _PHRASES["questions"]  # split -> name -> phrases
