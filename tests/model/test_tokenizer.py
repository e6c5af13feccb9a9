"""Text <-> ids: nothing is lost, nothing is forged, transformers agrees, and mistakes get one line."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.errors import UserError
from nanorchestra.model import tokenizer as module
from nanorchestra.model.tokenizer import (
    SPECIAL_TOKENS,
    TEXT_TOKENS,
    IncrementalDecoder,
    Tokenizer,
    main,
    train_bpe,
)

LINE = 'The cheapest expert answers the question.\n\nIt\'s 12 cents, they\'ll say: 東京, naïve, {"name": "search"}.\r\n'
CORPUS = [LINE * 3, "  the  end\n" * 3]
ADDED = (*SPECIAL_TOKENS, *TEXT_TOKENS)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
# Text as users and tools write it, seasoned with what is likely to go wrong: markers, broken markers, combining marks, line breaks.
ODD = [
    "<|im_",
    "end|>",
    "</",
    "think>",
    "e\u0301",
    "\u0301",
    "🙂",
    "東",
    "\r\n",
    "\n\n",
    "  ",
    "'ll",
    " the",
    "7",
    "\x00",
]
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


@pytest.mark.parametrize("token", ADDED)
def test_each_added_token_is_one_id_when_asked_for_and_plain_text_otherwise(tokenizer, token):
    assert tokenizer.encode("a" + token + "b", special=True)[1] == tokenizer.token_id(token)
    assert tokenizer.decode([tokenizer.token_id(token)]) == token
    assert len(tokenizer.encode(token)) > 1


@QUICK
@given(text=st.text())
def test_the_two_encoders_agree_on_text_without_markers(tokenizer, text):
    if not any(token in text for token in ADDED):
        assert tokenizer.encode(text) == tokenizer.encode(text, special=True)


def test_added_tokens_are_those_of_qwen3_in_its_order(tokenizer):
    """With 151,643 ids before them these are Qwen3's own ids: endoftext 151643, im_end 151645, tool_call 151657, </think> 151668."""
    first = tokenizer.vocab_size - len(ADDED)
    offsets = {
        "endoftext": 0,
        "im_start": 1,
        "im_end": 2,
        "tool_call_start": 14,
        "tool_call_end": 15,
        "tool_response_start": 22,
    }
    offsets |= {"tool_response_end": 23, "think_start": 24, "think_end": 25}
    assert {name: getattr(tokenizer, name) - first for name in offsets} == offsets
    assert tokenizer.eos_ids == (tokenizer.im_end, tokenizer.endoftext)
    assert len(ADDED) == 26 and tokenizer.added_ids == set(range(first, tokenizer.vocab_size))


def test_skip_special_drops_roles_but_keeps_reasoning_and_calls(tokenizer):
    text = "<|im_start|>x<think>y</think><tool_call>{}</tool_call><|im_end|><|endoftext|>"
    assert (
        tokenizer.decode(tokenizer.encode(text, special=True), skip_special=True)
        == "x<think>y</think><tool_call>{}</tool_call>"
    )


def test_words_digits_and_line_breaks_are_split_as_qwen_does(tokenizer):
    """A merge never crosses these borders, however common the pair: the pattern decides before the merges do."""
    split = tokenizer._plain.pre_tokenizer.pre_tokenize_str("It's 2024!\n\n  ok")
    assert [text for text, _ in split] == ["It", "'s", "Ġ", "2", "0", "2", "4", "!ĊĊ", "Ġ", "Ġok"]


@QUICK
@given(ids=st.lists(st.integers(0, 329), max_size=40))
def test_streaming_any_ids_gives_the_text_of_the_whole(tokenizer, ids):
    """Even for ids that are no UTF-8 at all, as an untrained policy samples them."""
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_a_character_is_never_streamed_in_halves(tokenizer):
    decoder = IncrementalDecoder(tokenizer)
    out = [decoder.feed(i) for i in tokenizer.encode("🙂ok")]
    assert out[:4] == ["", "", "", "🙂"] and "".join(out) == "🙂ok" and decoder.flush() == ""
    assert decoder.feed(tokenizer.encode("🙂")[0]) == "" and decoder.flush() == "\ufffd"


def test_bytes_of_refuses_ids_that_do_not_exist(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=str(token)):
            tokenizer.bytes_of(token)


def test_half_a_surrogate_pair_is_replaced_not_fatal(tokenizer):
    """json.loads turns "\\ud83d" into a string that UTF-8 cannot hold; a tool's answer must not end the run."""
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42", special=True)) == "🙂"


def test_encode_returns_a_list_of_the_callers_own(tokenizer):
    tokenizer.encode("the end").append(-1)
    assert -1 not in tokenizer.encode("the end")


def test_training_is_deterministic_and_counts_every_id(tmp_path, tokenizer):
    assert tokenizer.vocab_size == 330
    tokenizer.save(tmp_path / "a")
    train_bpe(iter(CORPUS), 330).save(tmp_path / "b")
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()


def test_training_on_rendered_conversations_learns_nothing_from_the_markers():
    plain = train_bpe(["hello there"] * 9, 400)
    rendered = train_bpe(["<|im_start|>hello there<|im_end|>"] * 9, 400)
    assert rendered._marked.to_str() == plain._marked.to_str()


def test_a_corpus_that_is_too_small_gives_fewer_ids_and_too_few_ids_are_refused():
    assert train_bpe(["ab ab"], 5000).vocab_size < 300
    with pytest.raises(UserError, match="vocab_size = 281: .*282"):
        train_bpe([], 281)


def test_saved_tokenizer_is_the_same_after_loading(tokenizer, saved):
    loaded = Tokenizer.from_dir(saved)
    text = CORPUS[0] + "<think>"
    assert loaded.encode(text, special=True) == tokenizer.encode(text, special=True)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert sorted(file.name for file in saved.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_save_keeps_the_configuration_and_template_of_the_checkpoint_it_came_from(saved, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    Tokenizer.from_dir(saved).save(source)
    (source / "tokenizer_config.json").write_text('{"eos_token": "mine"}')
    (source / "chat_template.jinja").write_text("{{ template }}")
    Tokenizer.from_dir(source).save(target)
    assert (target / "tokenizer_config.json").read_text() == '{"eos_token": "mine"}'
    assert (target / "chat_template.jinja").read_text() == "{{ template }}"


@pytest.mark.slow  # importing transformers takes seconds
def test_transformers_gives_the_same_ids_and_text(tokenizer, saved):
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(saved)
    assert len(reference) == tokenizer.vocab_size and reference.eos_token_id == tokenizer.im_end

    @QUICK
    @given(text=TEXTS)
    def check(text):
        ids = tokenizer.encode(text, special=True)
        assert reference(text, add_special_tokens=False)["input_ids"] == ids
        assert reference.decode(ids) == tokenizer.decode(ids)
        assert reference.decode(ids, skip_special_tokens=True) == tokenizer.decode(
            ids, skip_special=True
        )

    check()


def test_bad_files_get_one_line_that_names_the_file(saved, tmp_path):
    whole = (saved / "tokenizer.json").read_text(encoding="utf-8")
    renamed = {
        **json.loads(whole),
        "added_tokens": [
            {**t, "content": t["content"] + "?"} for t in json.loads(whole)["added_tokens"]
        ],
    }
    odd = json.loads(whole)
    odd["model"]["vocab"]["not bytes"] = 5000
    cases = {
        "absent": (None, "no such file"),
        "cut": (whole[: len(whole) // 2], "not a tokenizer.json"),
        "empty": ("", "not a tokenizer.json"),
        "binary": (b"\xff\xfe", "UTF-8"),
        "markers": (json.dumps(renamed), r"added_tokens has no '<\|endoftext\|>'"),
        "alphabet": (json.dumps(odd), "'not bytes' is not spelled in bytes"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "tokenizer.json").write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        with pytest.raises(UserError, match=message) as error:
            Tokenizer.from_dir(tmp_path / name)
        assert str(tmp_path / name / "tokenizer.json") in str(error.value) and "\n" not in str(
            error.value
        )


def _change(path, value):
    """A damage of tokenizer.json: the value at path ("model", "merges"), or a function of the old one."""

    def damage(data):
        *outer, last = path
        for key in outer:
            data = data[key]
        data[last] = value(data.get(last)) if callable(value) else value

    return damage


def _shared_id(data):
    data["model"]["vocab"]["zz"] = data["model"]["vocab"]["e"]


def _words_only(data):
    data["model"] = {"type": "WordLevel", "vocab": data["model"]["vocab"], "unk_token": "a"}


@pytest.mark.parametrize(
    "damage, says",
    [
        (_change(["model", "merges"], []), "model.merges must be whole"),
        (_change(["model", "merges"], lambda merges: merges[:5]), "model.merges must be whole"),
        (_change(["pre_tokenizer"], None), "comes back"),
        (_change(["pre_tokenizer"], {"type": "Whitespace"}), "comes back"),
        (_change(["normalizer"], {"type": "Lowercase"}), "comes back"),
        (_change(["model", "vocab", "zz"], 4_000_000_000), "largest id is 4000000000"),
        (_shared_id, "stands for two tokens"),
        (_words_only, "model.type is 'WordLevel'"),
    ],
)
def test_a_tokenizer_that_loads_but_does_not_give_text_back_is_refused(
    saved, tmp_path, damage, says
):
    data = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    damage(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as refused:
        Tokenizer.from_dir(tmp_path)
    assert (
        str(refused.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")
        and says in str(refused.value)
        and "\n" not in str(refused.value)
    )


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_companion_that_is_no_text_is_named(saved, tmp_path, name):
    (tmp_path / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=f"{name}: cannot be read as UTF-8"):
        Tokenizer.from_dir(tmp_path)


def test_truncation_and_padding_in_the_file_are_not_applied(saved, tmp_path):
    """Some published files carry the settings of a training run; a prompt must never be cut silently."""
    data = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    data["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    loaded = Tokenizer.from_dir(tmp_path)
    assert (
        loaded.decode(loaded.encode("the cheapest expert", special=True)) == "the cheapest expert"
    )


def test_a_failed_save_leaves_the_old_file_whole(tokenizer, saved, monkeypatch):
    before = (saved / "tokenizer.json").read_bytes()

    def write_half(path, text, encoding):
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_text", write_half)
    with pytest.raises(UserError, match="No space left"):
        tokenizer.save(saved)
    assert (saved / "tokenizer.json").read_bytes() == before


def test_command_trains_and_says_what_it_made(tmp_path, capsys):
    (tmp_path / "corpus.txt").write_text("".join(CORPUS), encoding="utf-8", newline="")
    command = [
        "train",
        "--input",
        str(tmp_path / "corpus.txt"),
        "--vocab-size",
        "330",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 0 and "330 ids" in capsys.readouterr().out
    made = Tokenizer.from_dir(tmp_path / "out")
    assert made.vocab_size == 330 and len(made.encode(".\r\n\r\n")) < 5
    assert (
        main([*command[:4], "100000", *command[5:]]) == 0
        and "asked for 100000" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input": "missing.txt"}, "missing.txt: No such file"),
        ({"input": "latin1.txt"}, "latin1.txt: not UTF-8 text (byte 0xe9)"),
        ({"input": "."}, "Is a directory"),
        ({"size": "281"}, "vocab_size = 281"),
        ({"size": "many"}, "invalid int value: 'many'"),
        ({"out": "good.txt"}, "good.txt: is a file"),
        ({"out": "good.txt/below"}, "cannot write"),
    ],
)
def test_command_mistakes_are_one_line_and_a_status(tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("some text\n")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 au lait\n")
    with pytest.raises(SystemExit) as exit:
        options = [
            "--input",
            change.get("input", "good.txt"),
            "--vocab-size",
            change.get("size", "300"),
            "--out",
            change.get("out", "out"),
        ]
        raise SystemExit(main(["train", *options]))
    said = (
        capsys.readouterr().err if exit.value.code == 1 else str(exit.value.code)
    )  # python itself prints a string status
    assert message in said and len(said.strip().splitlines()) == 1 and exit.value.code != 0
    assert not (tmp_path / "out").exists()
