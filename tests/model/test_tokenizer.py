"""Text and ids: nothing is lost, nothing is forged, transformers agrees, bad files are refused."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import (
    SPECIAL_TOKENS,
    TEXT_TOKENS,
    IncrementalDecoder,
    Tokenizer,
    train_bpe,
)

LINE = (
    "The cheapest expert answers the question.\n\nIt's 12 cents, they'll say: 東京, naïve, {}.\r\n"
)
CORPUS = [LINE * 3, "  the  end\n" * 3]
ADDED = (*SPECIAL_TOKENS, *TEXT_TOKENS)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
ODD = ["<|im_", "end|>", "</", "think>", "e\u0301", "🙂", "東", "\r\n", "\n\n", "  ", "'ll", "7"]
PIECES = st.sampled_from([*ADDED, *ODD])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(CORPUS, 330)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "deep" / "dir"
    tokenizer.save(path)
    return path


@QUICK
@given(text=TEXTS)
def test_plain_text_never_becomes_an_added_token_and_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not tokenizer.added_ids.intersection(ids)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    if not any(token in text for token in ADDED):
        assert ids == tokenizer.encode(text, special=True)


def test_added_tokens_are_those_of_qwen3_in_its_order(tokenizer):
    """With 151,643 ids before them these are Qwen3's own: im_end 151645, tool_call 151657."""
    first = tokenizer.vocab_size - len(ADDED)
    offsets = {"im_start": 1, "im_end": 2, "tool_call_start": 14, "tool_call_end": 15}
    assert {name: getattr(tokenizer, name) - first for name in offsets} == offsets
    assert tokenizer.eos_ids == (first + 2, first) and len(ADDED) == 26
    assert tokenizer.added_ids == set(range(first, tokenizer.vocab_size))
    for offset, token in enumerate(ADDED):
        assert tokenizer.encode("a" + token + "b", special=True)[1] == first + offset
        assert tokenizer.decode([first + offset]) == token and len(tokenizer.encode(token)) > 1


def test_skip_special_drops_roles_but_keeps_reasoning_and_calls(tokenizer):
    text = "<|im_start|>x<think>y</think><tool_call>{}</tool_call><|im_end|><|endoftext|>"
    kept = tokenizer.decode(tokenizer.encode(text, special=True), skip_special=True)
    assert kept == "x<think>y</think><tool_call>{}</tool_call>"


@QUICK
@given(ids=st.lists(st.integers(0, 329), max_size=40))
def test_streaming_any_ids_gives_the_text_of_the_whole(tokenizer, ids):
    """Also for ids that are no UTF-8, as an untrained policy samples them."""
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_a_character_is_never_streamed_in_part(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    out = [decoder.feed(i) for i in tokenizer.encode("🙂ok")]
    assert out[:4] == ["", "", "", "🙂"] and "".join(out) == "🙂ok" and decoder.flush() == ""
    assert decoder.feed(tokenizer.encode("🙂")[0]) == "" and decoder.flush() == "\ufffd"


def test_half_a_surrogate_pair_is_replaced(tokenizer):
    """json.loads turns "\\ud83d" into a string that UTF-8 cannot hold."""
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42", special=True)) == "🙂"


def test_encode_returns_a_list_of_the_callers_own(tokenizer):
    tokenizer.encode("the end").append(-1)
    assert -1 not in tokenizer.encode("the end")


def test_training_is_deterministic_and_counts_every_id(tmp_path, tokenizer):
    assert tokenizer.vocab_size == 330 and train_bpe(["ab ab"], 5000).vocab_size < 300
    tokenizer.save(tmp_path / "a")
    train_bpe(iter(CORPUS), 330).save(tmp_path / "b")
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in "ab")
    assert first == second
    with pytest.raises(UserError, match="vocab_size = 281: expected at least 282"):
        train_bpe([], 281)


def test_training_on_rendered_conversations_learns_nothing_from_the_markers(tmp_path):
    for name, text in (("a", "hello there"), ("b", "<|im_start|>hello there<|im_end|>")):
        train_bpe([text] * 9, 400).save(tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in "ab")
    assert first == second


def test_save_keeps_the_files_of_the_checkpoint_it_came_from(tokenizer, saved, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    (tmp_path / "source/tokenizer_config.json").write_text('{"eos_token": "mine"}')
    (tmp_path / "source/chat_template.jinja").write_text("{{ template }}")
    loaded = Tokenizer.from_dir(tmp_path / "source")
    text = CORPUS[0] + "<think>"
    assert loaded.encode(text, special=True) == tokenizer.encode(text, special=True)
    loaded.save(tmp_path / "target")
    for file in (tmp_path / "source").iterdir():
        assert (tmp_path / "target" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow  # importing transformers takes seconds
def test_transformers_gives_the_same_ids_and_text(tokenizer, saved):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(saved)
    assert len(reference) == tokenizer.vocab_size and reference.eos_token_id == tokenizer.im_end

    @QUICK
    @given(text=TEXTS)
    def check(text):
        ids = tokenizer.encode(text, special=True)
        assert reference(text, add_special_tokens=False)["input_ids"] == ids
        assert reference.decode(ids) == tokenizer.decode(ids)
        kept = tokenizer.decode(ids, skip_special=True)
        assert reference.decode(ids, skip_special_tokens=True) == kept

    check()


def without_markers(data):
    data["added_tokens"] = []


def with_a_word(data):
    data["model"]["vocab"]["not bytes"] = 5000


@pytest.mark.parametrize(
    "damage, words",
    [
        (None, "No such file"),
        ("", "not a readable tokenizer.json"),
        (without_markers, "added_tokens has no '<|endoftext|>'"),
        (with_a_word, "token 'not bytes' does not belong to a byte-level BPE"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(saved, tmp_path, damage, words):
    data = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    if callable(damage):
        damage(data)
    if damage is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(data) if damage else "")
    with pytest.raises(UserError) as refusal:
        Tokenizer.from_dir(tmp_path)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert words in message and "\n" not in message


def test_truncation_in_the_file_is_not_applied(saved, tmp_path):
    """Some published files carry the settings of a training run."""
    data = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    side = {"direction": "Right", "strategy": "LongestFirst", "stride": 0}
    data["truncation"] = side | {"max_length": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    loaded = Tokenizer.from_dir(tmp_path)
    assert loaded.decode(loaded.encode("the expert", special=True)) == "the expert"
