"""SmolLM2-135M-Instruct, from its GGUF file: adopted, it calls a tool, learns, and is saved."""

from __future__ import annotations

import json

import pytest
from smollm import smollm_file

import serve
from nanorchestra.config import Config, TaskSection
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.guide import Form, Guide
from nanorchestra.engine.sequence import SamplingParams
from nanorchestra.formats.adopt import adopt
from nanorchestra.formats.load import load_model
from nanorchestra.model import chat
from nanorchestra.model.checkpoint import save_checkpoint
from nanorchestra.model.lora import add_adapters
from nanorchestra.training.grpo import as_group
from nanorchestra.training.packing import samples_in
from nanorchestra.training.trainer import Trainer
from nanorchestra.training.warm_start import Demonstrations
from train import supervised_update
from worlds.load import open_world

pytestmark = pytest.mark.slow
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def adopted():
    """The model with Qwen3's markers, and its tokenizer."""
    model, tokenizer = load_model(smollm_file())
    return model, adopt(model, tokenizer)[0]


def test_a_chat_in_the_terminal(capsys):
    question = "What is the capital of France?"
    command = ["--model", str(smollm_file()), "--temperature", "0", "--ask", question]
    assert serve.main(command) == 0
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_a_guided_turn_calls_a_tool_by_its_schema(adopted):
    model, tokenizer = adopted
    messages = [{"role": "user", "content": "Use the tool: how is the weather in Oslo?"}]
    prompt = chat.encode(tokenizer, messages, [WEATHER], enable_thinking=False)
    engine = Engine(model, tokenizer, num_pages=40, page_size=16, max_running=1)
    guide = Guide(tokenizer, Form([WEATHER], required=True, thinks=False))
    params = SamplingParams(60, temperature=0.0, guide=guide)
    (completion,) = engine.generate([prompt], params)
    turn = chat.parse(tokenizer, completion.token_ids)
    (call,) = turn.calls
    assert not call.error and call.name == "weather", completion.text
    assert call.arguments["city"] == "Oslo" and call.arguments["unit"] in ("C", "F")


def test_an_adapter_learns_a_demonstration_and_is_saved_merged(adopted, sandbox, tmp_path):
    model, tokenizer = adopted
    add_adapters(model.bfloat16(), 8, 16.0, 0)
    world = open_world(TaskSection("desk"), 0, sandbox)
    demonstrations = Demonstrations(Config(), world, tokenizer)
    groups = [as_group([demonstrations._trajectory(*world.lesson(0, 1))])]
    trainer = Trainer(model, vocab_limit=tokenizer.vocab_size, optimizer="adamw")
    losses = [supervised_update(trainer, groups, 1e-3)["loss"] for _ in range(4)]
    assert losses[-1] < 0.8 * losses[0], losses

    save_checkpoint(model, tokenizer, tmp_path / "trained")
    kind = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert kind["model_type"] == "llama" and kind["dtype"] == "bfloat16"
    again, _ = load_model(tmp_path / "trained", dtype="bfloat16")
    trainer = Trainer(again, vocab_limit=tokenizer.vocab_size)
    trainer.compute_first_logprobs(groups, 1.0)
    (sample,) = samples_in(groups)
    assert -sum(sample.first_logprobs) / sample.loss_ids < losses[0]
