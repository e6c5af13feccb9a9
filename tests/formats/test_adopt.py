"""Another model gets Qwen3's markers, and is otherwise the same."""

from dataclasses import replace

import pytest
import torch
import transformers
from foreign_tokenizers import make_foreign

from nanorchestra.errors import UserError
from nanorchestra.formats.adopt import REQUIRED, adopt, main, unused_ids
from nanorchestra.formats.load import load_model, with_chat
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import save_checkpoint, stored_dtype
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.tokenizer import Tokenizer

TEXT = "It's 12 cents, they'll say: 東京.\n\n <tool_call> naïve"
SHAPE = ModelConfig(vocab_size=1, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=False)  # fmt: skip


@pytest.mark.parametrize("kind, tied", [("smollm2", True), ("llama3", False)])
def test_a_marker_has_an_id_of_its_own_and_everything_else_stays(kind, tied, tmp_path, capsys):
    source, out = make_foreign(kind, tmp_path / "source", ""), tmp_path / "out"
    tokenizer = with_chat(Tokenizer.from_dir(source), source)
    vocab = {"vocab_size": tokenizer.vocab_size + 12, "tie_word_embeddings": tied}
    model = Qwen3(replace(SHAPE, **vocab)).bfloat16()
    model.init_weights(0)
    save_checkpoint(model, tokenizer, source)
    assert main([str(source), "--out", str(out)]) == 0
    model, adopted = load_model(out)
    before = dict(load_model(source)[0].named_parameters())
    ids = {marker: adopted.token_id(marker) for marker in REQUIRED}
    ids = {marker: i for marker, i in ids.items() if marker not in tokenizer.backend.get_vocab()}
    assert f"{out}: {source} with {len(ids)} markers" in capsys.readouterr().out
    assert adopted.markers and adopted.encode(TEXT) == tokenizer.encode(TEXT)
    assert adopted.vocab_size <= model.config.vocab_size and stored_dtype(out) == "bfloat16"

    matrices = {"embed_tokens.weight", "lm_head.weight"} & set(before)
    kept = [i for i in range(model.config.vocab_size) if i not in ids.values()]
    for name, parameter in model.named_parameters():
        rows = kept if name in matrices else slice(None)
        assert torch.equal(parameter[rows], before[name][rows]), name
    for name in matrices:
        spelt = before[name][tokenizer.encode("tool response")].mean(0).bfloat16()
        assert torch.equal(model.get_parameter(name)[ids["<tool_response>"]].bfloat16(), spelt)

    theirs = transformers.AutoTokenizer.from_pretrained(out)
    turns = [{"role": "user", "content": "a b"}]
    marked = "".join(chat._prompt(turns, None, True, False))
    ours = chat.encode(adopted, turns, enable_thinking=False)
    assert theirs(marked, add_special_tokens=True).input_ids == ours
    assert main([str(source), "--out", str(out)]) == 2
    assert "it exists; name another one" in capsys.readouterr().err


def test_reserved_names_come_first_and_what_a_chat_needs_never(tmp_path):
    source = make_foreign("smollm2", tmp_path, "{{ '<repo_name>' }}")
    tokenizer = with_chat(Tokenizer.from_dir(source), source)
    vocab = tokenizer.vocab_size
    assert unused_ids(tokenizer, vocab + 1) == [vocab]
    tokenizer.chat.template = ""
    repo_name = tokenizer.token_id("<repo_name>")
    tokenizer.backend.add_special_tokens(["<|reserved_special_token_0|>"])
    assert unused_ids(tokenizer, vocab + 1) == [vocab, vocab, repo_name]
    model = Qwen3(replace(SHAPE, vocab_size=vocab + 1))
    with pytest.raises(UserError, match="lacks <tool_call>, .* has 2 tokens .* --tokens"):
        adopt(model, tokenizer)
