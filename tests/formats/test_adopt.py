"""Another model gets Qwen3's markers, and is otherwise the same."""

from pathlib import Path

import pytest
import torch
import transformers
from foreign_tokenizers import KINDS, make_foreign

from nanorchestra.errors import UserError
from nanorchestra.formats import adopt as program
from nanorchestra.formats.adopt import REQUIRED, adopt, unused_ids
from nanorchestra.formats.load import load_model, with_chat
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import save_checkpoint, stored_dtype
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import Tokenizer

TEXT = "It's 12 cents, they'll say: 東京.\n\n <tool_call> naïve"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def foreign(kind: str, folder: Path, spare: int = 12, tied: bool = True, template: str = ""):
    """A llama with a foreign tokenizer, and `spare` rows that the tokenizer does not reach."""
    directory = make_foreign(kind, folder, template)
    tokenizer = with_chat(Tokenizer.from_dir(directory), directory)
    vocab = tokenizer.vocab_size + spare
    model = Qwen3(ModelConfig(vocab, **SHAPE, qk_norm=False, tie_word_embeddings=tied))
    model.init_weights(0)
    return model, tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_marker_has_an_id_of_its_own_and_everything_else_stays(kind, tied, tmp_path):
    model, tokenizer = foreign(kind, tmp_path / "source", tied=tied)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adopted, ids = adopt(model, tokenizer)
    assert adopted.markers and set(ids) == set(REQUIRED) - set(tokenizer.backend.get_vocab())
    assert all(adopted.token_id(marker) == i for marker, i in ids.items())
    assert adopted.vocab_size <= model.config.vocab_size
    assert adopted.encode(TEXT) == tokenizer.encode(TEXT), "no text reads as a marker"

    matrices = {"embed_tokens.weight", "lm_head.weight"} & set(before)
    kept = [i for i in range(model.config.vocab_size) if i not in ids.values()]
    for name, parameter in model.named_parameters():
        rows = kept if name in matrices else slice(None)
        assert torch.equal(parameter[rows], before[name][rows]), name
    for name in matrices:
        spelt = before[name][tokenizer.encode("tool response")].mean(0)
        assert torch.equal(model.get_parameter(name)[ids["<tool_response>"]], spelt)

    save_checkpoint(model, adopted, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [{"role": "user", "content": TEXT}]
    marked = "".join(chat._prompt(turns, None, True, False)).replace(TEXT, "a b")
    turns[0]["content"] = "a b"
    ours = chat.encode(adopted, turns, enable_thinking=False)
    assert theirs(marked, add_special_tokens=True).input_ids == ours
    again, tokens = load_model(tmp_path / "out")
    assert tokens.markers and torch.equal(again.output_weight, model.output_weight)


def test_reserved_names_come_first_and_what_a_chat_needs_never(tmp_path):
    model, tokenizer = foreign("smollm2", tmp_path, spare=1, template="{{ '<repo_name>' }}")
    vocab = tokenizer.vocab_size
    assert unused_ids(tokenizer, vocab + 1) == [vocab]
    tokenizer.chat.template = ""
    repo_name = tokenizer.token_id("<repo_name>")
    assert unused_ids(tokenizer, vocab + 1) == [vocab, repo_name]
    tokenizer.backend.add_special_tokens(["<|reserved_special_token_0|>"])
    assert unused_ids(tokenizer, vocab + 1) == [vocab, vocab, repo_name]
    with pytest.raises(UserError, match="lacks <tool_call>, .* has 2 tokens .* --tokens"):
        adopt(model, tokenizer)
    for token in ("<no>", "<|im_end|>"):
        with pytest.raises(UserError, match="is none of its own added tokens"):
            adopt(model, tokenizer, [token])


def test_the_command_takes_a_hub_id_and_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    model, tokenizer = foreign("llama3", tmp_path / "source")
    save_checkpoint(model.bfloat16(), tokenizer, tmp_path / "source")
    monkeypatch.setattr("nanorchestra.formats.hub.download", lambda *_: tmp_path / "source")
    out = tmp_path / "out"
    assert program.main(["a/b", "--out", str(out)]) == 0
    assert f"{out}: a/b with 9 markers" in capsys.readouterr().out
    assert stored_dtype(out) == "bfloat16" and load_model(out)[1].markers
    for source, line in (("a/b", "it exists; name another one"), (out, "has all markers of Qwen3")):
        target = out if source == "a/b" else tmp_path / "new"
        assert program.main([str(source), "--out", str(target)]) == 2
        assert line in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
