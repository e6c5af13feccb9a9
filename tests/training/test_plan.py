"""The planner's numbers against the model itself, against published figures, and its advice against itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanorchestra.errors import UserError
from nanorchestra.model.lora import add_adapters, parameters_of
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import PRESETS, Qwen3
from nanorchestra.settings import load_config
from nanorchestra.training.plan import (
    GB,
    RATES,
    Choices,
    Shape,
    activation_numbers,
    fit,
    host_memory,
    memory,
    model_flops,
    model_of,
    parameters,
    peak,
    peak_flops,
    plan,
    step_tokens,
    times,
)

ROOT = Path(__file__).parents[2]
EIGHT = Shape(PRESETS["qwen3-8b"], 16, 8, 64, False)
NODE = Choices(8, True, False, 0, 32768, 2000, 32768)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_the_models_own(name):
    with torch.device("meta"):
        model = Qwen3(PRESETS[name])
    layer, total = parameters(PRESETS[name])
    assert layer == sum(p.numel() for p in model.layers[0].parameters()) and total == sum(
        p.numel() for p in model.parameters()
    )
    with torch.device("meta"):
        add_adapters(model, 16, 32.0, 0)
    assert parameters_of(PRESETS[name], 16) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_activations_are_what_autograd_keeps():
    """Counted by storage over a model's forward, less what does not grow with layers; on this device, without the kernels."""
    shape = replace(
        PRESETS["nano"],
        hidden_size=64,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    tokens = 96

    def kept(layers):
        model = Qwen3(replace(shape, num_hidden_layers=layers))
        model.init_weights(0)
        own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ):
            out = model(
                torch.arange(tokens), torch.arange(tokens), packed_attention([Segment(0, tokens)])
            )
        return out, sum(
            t.untyped_storage().nbytes() / 4 for place, t in seen.items() if place not in own
        )

    counts = [kept(layers)[1] for layers in (2, 6)]
    assert (counts[1] - counts[0]) / 4 / tokens == pytest.approx(
        activation_numbers(shape, kernels=False), rel=0.05
    )


def test_memory_of_the_8b_is_what_it_is_elsewhere():
    """15.3 GiB of fp32 states a GPU on eight, an engine of 15.3 GiB, 2.25 GiB of layer inputs for 8k tokens, as others calculate it."""
    parts = memory(EIGHT, NODE)
    states = sum(
        parts[name][1] for name in ("weights, trained", "gradients, fp32", "moments, fp32")
    )
    assert states / 2**30 == pytest.approx(15.3, rel=0.01) and parts["engine, bf16"][
        0
    ] / 2**30 == pytest.approx(15.3, rel=0.01)
    inputs = (
        memory(EIGHT, replace(NODE, token_budget=8192 * 2))["activations, checkpointed"][1]
        - memory(EIGHT, replace(NODE, token_budget=8192))["activations, checkpointed"][1]
    )
    assert 2.25 < inputs / 2**30 < 2.25 + 2  # and one layer's, which is being computed again
    assert parts["KV pages"][0] == 2000 * 64 * 144 * 1024 and parts["KV pages"][1] == 0
    assert parts["loss"][1] < 1 * GB


def test_the_loss_of_8192_ids_takes_less_than_650_mb():
    from nanorchestra.training.plan import loss_workspace

    for kernels in (True, False):
        assert loss_workspace(PRESETS["qwen3-8b"], 8192, kernels) < 650e6


def test_memory_adds_up_over_ranks_and_falls_with_every_choice():
    one, eight = (memory(EIGHT, replace(NODE, gpus=n)) for n in (1, 8))
    for name in ("weights, trained", "gradients, fp32", "moments, fp32"):
        assert one[name][1] == pytest.approx(8 * eight[name][1])
    most = replace(NODE, checkpointing=False)
    for change in (
        dict(checkpointing=True),
        dict(token_budget=16384),
        dict(offload=True),
        dict(rank=32),
        dict(gpus=16),
    ):
        assert sum(p[1] for p in memory(EIGHT, replace(most, **change)).values()) < sum(
            p[1] for p in memory(EIGHT, most).values()
        ), change
    reference = memory(replace(EIGHT, reference=True), NODE)["reference, fp32"][1]
    assert (
        reference > 0
        and memory(replace(EIGHT, reference=True), replace(NODE, rank=8))["reference, fp32"][1] == 0
    )


def test_a_replica_is_divided_by_the_gpus_of_its_node():
    text, _ = plan(load_config(ROOT / "configs" / "qwen3-8b-multinode.toml"), 16)
    shown = {line[2:22].strip(): line.split()[-1] for line in text.splitlines() if line}
    assert (shown["weights, trained"], shown["gradients, fp32"], shown["moments, fp32"]) == (
        "4.10",
        "4.10",
        "8.19",
    ) and "a replica on every 8" in text
    assert [replace(NODE, gpus=n, node=True).shards for n in (1, 6, 8, 12, 16, 32)] == [
        1,
        6,
        8,
        6,
        8,
        8,
    ] and replace(NODE, gpus=16).shards == 16
    one, two, flat = NODE, replace(NODE, gpus=16, node=True), replace(NODE, gpus=16)
    assert memory(EIGHT, two) == memory(EIGHT, one) == memory(EIGHT, replace(one, node=True))
    for shape in (EIGHT, replace(EIGHT, reference=True)):
        hosts = [host_memory(shape, replace(choices, offload=True)) for choices in (one, flat, two)]
        assert (
            hosts == [hosts[0], hosts[0], 2 * hosts[0]]
            and hosts[0] == (20 if shape.reference else 16) * parameters(EIGHT.model)[1]
        )
    assert (
        memory(EIGHT, replace(two, offload=True))["gradients, fp32"]
        == memory(EIGHT, two)["gradients, fp32"]
    )  # summed up there until they are all-reduced


def test_replicas_gather_inside_a_node_and_all_reduce_their_gradients_over_the_network():
    rates, twice, total = (
        RATES["h100"],
        replace(EIGHT, prompts=2 * EIGHT.prompts),
        parameters(EIGHT.model)[1],
    )
    one, two, flat = (
        times(shape, choices, rates)
        for shape, choices in (
            (EIGHT, NODE),
            (twice, replace(NODE, gpus=16, node=True)),
            (twice, replace(NODE, gpus=16)),
        )
    )
    assert two["gathering"][0] - one["gathering"][0] == pytest.approx(4 * total / 8 / rates.network)
    assert flat["gathering"][0] / one["gathering"][0] == pytest.approx(
        rates.link / rates.network * 15 / 14
    )
    assert (
        two["optimizer"] == one["optimizer"]
        and two["weights to the engine"]
        == one["weights to the engine"]
        < flat["weights to the engine"]
    )


def test_an_offloaded_reference_leaves_only_what_is_gathered_of_it():
    offload = replace(NODE, offload=True)
    with_it, without = (
        memory(replace(EIGHT, reference=reference), offload) for reference in (True, False)
    )
    layer, total = parameters(EIGHT.model)
    assert with_it["reference, fp32"] == (0, 0)
    assert with_it["layers gathered, bf16"][1] - without["layers gathered, bf16"][1] == 2 * (
        total - 35 * layer
    )


def test_training_time_is_that_of_the_flops_per_token():
    """5.27e10 FLOPs a trained token at 8k without recomputation and 7.0e10 with; attention's backward counted 2.5 and the head for sampled ids alone."""
    alone = replace(EIGHT, prompts=128, group_size=1)
    tokens, _ = step_tokens(alone, 32768)
    for checkpointing, flops in ((False, 5.27e10), (True, 7.0e10)):
        seconds = times(alone, replace(NODE, checkpointing=checkpointing), RATES["h100"])[
            "training"
        ][0]
        assert seconds * 8 * RATES["h100"].flops / tokens == pytest.approx(flops, rel=0.08)


def test_times_fall_with_gpus_and_rates():
    for phase in ("rollout", "training", "optimizer"):
        slow, more, faster = (
            times(EIGHT, replace(NODE, gpus=n), RATES[gpu])[phase][0]
            for n, gpu in ((8, "a100"), (16, "a100"), (8, "h200"))
        )
        assert more < slow and faster < slow, phase


@pytest.mark.parametrize(
    "gpus, limit, node",
    [
        (8, 80, False),
        (8, 48, False),
        (1, 141, False),
        (2, 80, False),
        (1, 80, False),
        (4, 40, False),
        (16, 55, True),
        (16, 48, True),
    ],
)
def test_the_advice_fits_and_nothing_in_it_is_superfluous(gpus, limit, node):
    start = replace(NODE, gpus=gpus, checkpointing=False, node=node)
    assert peak(memory(EIGHT, start)) > limit * GB
    found = fit(EIGHT, start, limit * GB)
    assert found is not None
    final, words = found
    assert peak(memory(EIGHT, final)) <= limit * GB and words
    changed = {name: value for name, value in vars(final).items() if value != getattr(start, name)}
    assert sum(len(w.split(": ")[0].split("--")) - 1 for w in words) == len(changed)
    for name in changed:
        if name not in ("token_budget", "context"):
            assert (
                peak(memory(EIGHT, replace(final, **{name: getattr(start, name)}))) > limit * GB
            ), name


def test_a_4b_with_adapters_fits_one_card_of_24_gb_and_an_8b_one_of_80():
    four = replace(EIGHT, model=PRESETS["qwen3-4b"])
    assert fit(four, Choices(1, False, False, 32, 8192, 64, 8192), 24 * GB) is not None
    assert fit(EIGHT, Choices(1, False, False, 32, 8192, 500, 8192), 80 * GB) is not None


def test_what_cannot_fit_is_said(tmp_path):
    text, fits = plan(load_config(ROOT / "configs" / "qwen3-8b.toml"), 1, 12 * GB)
    assert not fits and "engine's copy of the model alone" in text
    text, fits = plan(load_config(ROOT / "configs" / "nano.toml"))
    assert fits and "fits" in text and "What makes it fit" not in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(gpus=0), "--gpus is 0"),
        (dict(gpu="b1"), "h100, h200"),
        (dict(limit=0), "--memory is 0"),
        (dict(limit=float("nan")), "--memory"),
    ],
)
def test_wrong_arguments_get_one_line(arguments, words):
    with pytest.raises(UserError, match=words):
        plan(load_config(None), **arguments)


def test_the_model_is_that_of_the_path_or_its_name(tmp_path):
    assert (
        model_of(load_config(None, {"model.path": "somewhere/Qwen3-8B"})) == PRESETS["qwen3-8b"]
    )
    with pytest.raises(UserError, match="config.json"):
        model_of(load_config(None, {"model.path": str(tmp_path / "unknown")}))


@pytest.mark.slow
def test_the_command_finds_a_config_by_its_name():
    for words, code, expected in (
        (["--config", "nano"], 0, "all trained"),
        (["--config", "qwen3-8b", "--gpus", "8", "--memory", "40"], 1, "What makes it fit"),
        (["--config", "none"], 2, "none: cannot be read"),
    ):
        done = subprocess.run(
            [sys.executable, "train.py", "--plan", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (
            done.returncode == code
            and expected in done.stdout + done.stderr
            and "Traceback" not in done.stderr
        ), done


def test_model_flops_are_what_torch_counts_in_the_products(nano_model):
    """Of the linear layers, forward and backward, and of the head; attention is counted by hand: 4 FLOPs a pair, head and dimension, forward."""
    config, tokens, drawn = nano_model.config, 40, 13
    with FlopCounterMode(display=False) as counted:
        hidden = nano_model(
            torch.arange(tokens), torch.arange(tokens), packed_attention([Segment(0, tokens)])
        )
        (hidden[:drawn] @ nano_model.output_weight.T).sum().backward()
    products = sum(
        count
        for op, count in counted.get_flop_counts()["Global"].items()
        if "mm" in str(op) and "bmm" not in str(op)
    )
    pairs = sum(range(1, tokens + 1))
    attention = 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert model_flops(config, tokens, pairs, drawn) == pytest.approx(products + 3 * attention)
    forward = model_flops(config, tokens, pairs, drawn) / 3
    assert model_flops(config, tokens, pairs, drawn, reference=True) == pytest.approx(4 * forward)
    assert model_flops(config, tokens, pairs, drawn, adapters=True) == pytest.approx(
        2 * forward + attention
    )


def test_the_peak_of_a_cpu_is_measured_and_that_of_a_gpu_is_its_own(monkeypatch):
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e14
    for name, dtype, peak in (
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA H200", torch.float32, None),
        ("Tesla T4", torch.bfloat16, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), dtype) == peak
