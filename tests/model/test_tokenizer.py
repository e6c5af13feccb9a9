"""Text and ids: nothing is lost, nothing is forged, transformers agrees, bad files are refused."""

import json
import re
import unicodedata

import pytest
from foreign_tokenizers import KINDS, make_foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import SPECIAL_TOKENS, TEXT_TOKENS, Tokenizer, train_bpe

LINE = (
    "The cheapest expert answers the question.\n\nIt's 12 cents, they'll say: 東京, naïve, {}.\r\n"
)
CORPUS = [LINE * 3, "  the  end\n" * 3]
ADDED = (*SPECIAL_TOKENS, *TEXT_TOKENS)
QUICK = settings(max_examples=80, deadline=None, derandomize=True, database=None)
ODD = ["<|im_", "end|>", "</", "think>", "e\u0301", "🙂", "東", "\r\n", "\n\n", "  ", "'ll", "7"]
ODD += ["<|eot_id|>", " cheapestexpert", "12345", "a  b"]
PIECES = st.sampled_from([*ADDED, *ODD])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(CORPUS, 330)


@QUICK
@given(text=TEXTS)
def test_plain_text_never_becomes_an_added_token_and_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not tokenizer.backend.get_added_tokens_decoder().keys() & set(ids)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_added_tokens_are_those_of_qwen3_in_its_order(tokenizer):
    """With 151,643 ids before them these are Qwen3's own: im_end 151645, tool_call 151657."""
    assert tokenizer.vocab_size == 330
    first = 330 - len(ADDED)
    assert tokenizer.eos_ids == (first + 2, first) and len(ADDED) == 26
    assert (tokenizer.end_of_turn, tokenizer.token_id("</tool_call>")) == (first + 2, first + 15)
    added = tokenizer.backend.get_added_tokens_decoder()
    assert added.keys() == set(range(first, tokenizer.vocab_size))
    for offset, token in enumerate(ADDED):
        assert tokenizer.token_id(token) == first + offset
        assert tokenizer.decode([first + offset]) == token and len(tokenizer.encode(token)) > 1


@pytest.mark.slow  # importing transformers takes seconds
@pytest.mark.parametrize("kind", ["qwen3", *KINDS])
def test_transformers_gives_the_same_ids_and_text(kind, tokenizer, tmp_path):
    if kind != "qwen3":
        tokenizer = Tokenizer.from_dir(make_foreign(kind, tmp_path / "foreign"))
    tokenizer.save(tmp_path / "saved")
    reference = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert len(reference) == tokenizer.vocab_size
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]

    @QUICK
    @given(text=TEXTS)
    def check(text):
        ids = reference(text, add_special_tokens=False)["input_ids"]
        if not any(token in text for token in added):
            assert ids == tokenizer.encode(text)
        assert reference.decode(ids) == tokenizer.decode(ids)
        kept = tokenizer.decode(ids, skip_special=True)
        assert reference.decode(ids, skip_special_tokens=True) == kept

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_an_added_token_of_another_models_tokenizer(kind, tmp_path):
    """Not even if the vocabulary holds the added tokens, and takes whole words from it."""
    path = make_foreign(kind, tmp_path)
    data = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, tokens = data["model"]["vocab"], {t["content"]: t["id"] for t in data["added_tokens"]}
    data["model"] |= {"vocab": vocab | tokens, "ignore_merges": True, "unk_token": [*tokens][0]}
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    data["pre_tokenizer"]["trim_offsets"] = True
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = Tokenizer.from_dir(path)
    for text in [*tokens, "\x06", "".join(tokens), " ".join(tokens)]:
        ids = tokenizer.encode(text)
        assert not set(tokens.values()) & set(ids)
        assert tokenizer.decode(ids) == text


def test_a_tokenizer_of_another_kind_is_refused_in_one_line_that_names_it(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    words = {"type": "BPE", "vocab": {"\u2581the": 0}, "merges": []}  # as SentencePiece's
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"model": words}))
    with pytest.raises(UserError, match=re.escape(f"{file}: ") + ".*expected a byte-level BPE"):
        Tokenizer.from_dir(tmp_path)
