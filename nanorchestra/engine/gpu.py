"""Computes a planned step on a GPU, with Triton kernels and captured CUDA graphs.

A layer is six launches and four matrix products. The steps that occur again are graphs with the
draw inside: the logits never leave the device, and the next step can be launched before the host
reads the tokens. A launch copies one block of pinned memory (inputs.py) and waits for nothing.
"""

import torch
from torch import Tensor

from kernels.common import FP8, SIZES, wide_product
from kernels.decode import decode_attention
from kernels.decode_plan import DecodeWork, group_rows
from kernels.norm import rms_norm
from kernels.prefill import prefill_attention
from kernels.rope import norm_rope_store
from kernels.sample import sample
from kernels.swiglu import swiglu
from kernels.truncate import truncation
from nanorchestra.engine.inputs import BATCHES, CHUNKS, Host, Inputs, Sizes
from nanorchestra.engine.request import Request
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw
from nanorchestra.engine.scheduler import Plan
from nanorchestra.errors import require
from nanorchestra.model.quantise import QuantisedLinear
from nanorchestra.model.qwen3 import Qwen3

Outputs = tuple[Tensor, Tensor, Tensor]  # hidden states, tokens, log-probabilities of sampled rows


class _Launched:
    """A launched step's draws [R], on their way to the host, and its hidden states if needed."""

    def __init__(self, requests: list[Request], outputs: Outputs):
        hidden, self.tokens, logprobs = outputs
        self.row = {request: i for i, request in enumerate(requests)}
        plain = all(request.plain for request in requests)
        self.hidden = None if plain else hidden.clone()  # a replay overwrites it
        self._arrived, on_gpu = None, hidden.is_cuda
        # Copied now: behind the next step the copy would wait for that one too.
        self._host = [
            torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu).copy_(x, non_blocking=True)
            for x in (self.tokens, logprobs)
        ]
        if on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Draw]:
        """Waits for the draws."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return list(map(Draw, *(x.tolist() for x in self._host)))


def free_memory(device: torch.device) -> int:
    """Returns the bytes that the device has left."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class GpuRunner(Runner):
    """A Runner on Triton kernels.

    The kernels draw the rows of plain requests, `draw_tokens` the others. `graphs`: whether steps
    that occur again are captured.
    """

    overlaps = True

    def __init__(
        self, model: Qwen3, num_pages: int, page_size: int, vocab_size: int, kv_dtype: torch.dtype
    ):
        config, weight = model.config, model.embed_tokens.weight
        for name, value in (("head_dim", config.head_dim), ("page size", page_size)):
            right = f"the GPU's kernels take {', '.join(map(str, SIZES))}"
            require(value in SIZES, f"engine: {name} is {value}; {right}")
        self.graphs = weight.is_cuda
        self._captured: dict[Sizes, _Graph] = {}
        self._seen: set[Sizes] = set()  # captured when they come again
        self._again: set[Sizes] = set()  # captured by wake
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._most = group_rows(heads // kv_heads, weight.element_size())
        self._host = Host(page_size, self._most, weight.is_cuda)
        q, kv = heads * config.head_dim, kv_heads * config.head_dim
        matrices = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
        # A GPU multiplies 150 to 250 rows while it reads the weights once: a step with so many
        # tokens takes less than three steps that decode. And it has a graph.
        self.mixed = CHUNKS[-1], matrices / (2 * q)
        super().__init__(model, num_pages, page_size, vocab_size, kv_dtype)
        if weight.is_cuda:
            self.warm_up()

    @property
    def sizes_known(self) -> tuple[int, int]:
        """Returns how many sizes of steps have occurred, and how many have a graph.

        Steps between two equal readings were replays, those that `launch` never captures aside.
        """
        return len(self._seen), len(self._captured)

    @staticmethod
    def kv_dtypes(weight: Tensor) -> tuple[torch.dtype, ...]:
        """As Runner.kv_dtypes; FP8 too where the card computes with it."""
        old = weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9)
        return (weight.dtype,) if old else (weight.dtype, FP8)

    def sleep(self) -> None:
        """As Runner.sleep; graphs go too, since they read the pages where they lay."""
        super().sleep()
        self._again |= {sizes for sizes, graph in self._captured.items() if graph.used}
        self._captured = {}

    def wake(self) -> None:
        """As Runner.wake; captures the steps that were in use again, before any request waits."""
        super().wake()
        while self._again:
            sizes = self._again.pop()
            self._captured[sizes] = _Graph(self, sizes)

    def warm_up(self) -> None:
        """Compiles all kernels that a step can launch, so that no request waits for a compiler."""
        for batch in (1, 16, 64, 65):  # the bounds of tiles in quantised.py
            for tokens in (0, batch):
                sizes = Sizes(batch, 4, 4, tokens, min(tokens, 1), min(tokens, 1), batch, 4, True)
                for case in (sizes, sizes._replace(truncated=False)):
                    self._compute(Inputs(case, self.device))

    def launch(self, plan: Plan, after: _Launched | None = None) -> _Launched:
        """Starts the step and the draws of plan.sampling, and does not wait for them.

        after: a step whose draws are the newest ids of this one's requests, taken on the device.
        """
        self._copy_pages(plan.copies)
        sampling = plan.sampling  # the decodes among them
        chunks = sum(count for *_, count in plan.prefills)
        captured = self.graphs and chunks <= CHUNKS[-1] and len(sampling) <= BATCHES[-1]
        host = self._host.fill(plan, after.row if after else None, captured)
        graph, sizes = self._captured.get(host.sizes), host.sizes
        if graph is None and captured and sizes in self._seen:
            graph = self._captured[sizes] = _Graph(self, sizes)
        if captured:
            self._seen.add(sizes)
        inputs = graph.inputs if graph else Inputs(sizes, self.device)
        inputs.flat.copy_(host.flat, non_blocking=True)
        if after is not None:
            count = len(plan.decodes)
            torch.index_select(after.tokens, 0, inputs.source[:count], out=inputs.tokens[:count])
        outputs = graph.replay() if graph else self._compute(inputs)
        return _Launched(sampling, tuple(x[: len(sampling)] for x in outputs))

    def draws(self, launched: _Launched, requests: list[Request]) -> list[Draw | Exception]:
        """Waits for the draws of the requests; one that cannot be drawn has its error."""
        read = launched.read()
        draws = {request: read[launched.row[request]] for request in requests}
        if special := [request for request in requests if not request.plain]:
            rows = self._ints([launched.row[request] for request in special])
            drawn = self._sample(self._logits(launched.hidden[rows]), special)
            draws |= zip(special, drawn, strict=True)
        return list(draws.values())

    @torch.inference_mode()
    def _compute(self, x) -> Outputs:
        """Computes a step and its draws: what a graph captures."""
        hidden = self._forward(x).index_select(0, x.rows)
        if not len(hidden):
            return hidden, x.rows, x.temperature
        logits, floors = self._logits(hidden), None
        if x.sizes.truncated:
            floors = truncation(logits, x.temperature, x.top_k, x.top_p, self.vocab_size)
        return hidden, *sample(logits, x.uniform, x.temperature, self.vocab_size, floors)

    def _logits(self, hidden) -> Tensor:
        """The logits in fp32: the trainer's are not rounded to 16 bits either."""
        head = self.model.lm_head
        if isinstance(head, QuantisedLinear):
            return head.product(hidden, torch.float32)
        return wide_product(hidden, self.model.output_weight.T)

    def _forward(self, x) -> Tensor:
        """Runs the tokens through the model -> hidden states [T, hidden]."""
        model = self.model
        angles = x.positions[:, None].float() * model.rope_frequencies(self.device)
        cos, sin = angles.cos(), angles.sin()  # fp32 [T, D / 2]
        residual = model.embed_tokens(x.tokens)
        hidden = rms_norm(residual, model.layers[0].input_layernorm, model.config.rms_norm_eps)
        after = [block.input_layernorm for block in model.layers[1:]] + [model.norm]
        for layer, (block, norm) in enumerate(zip(model.layers, after, strict=True)):
            own, caches = block.self_attn, (self.k_cache[layer], self.v_cache[layer])
            norms = own.q_norm, own.k_norm
            q = norm_rope_store(own.qkv_proj(hidden), norms, cos, sin, *caches, x.slots, own.eps)
            hidden = own.o_proj(self._attend(q, caches, x).flatten(1))
            hidden = rms_norm(hidden, block.post_attention_layernorm, block.eps, residual)
            hidden = block.down_proj(swiglu(block.gate_up_proj(hidden)))
            hidden = rms_norm(hidden, norm, block.eps, residual)  # adds to the residual first
        return hidden

    def _attend(self, q, caches, x) -> Tensor:
        """Attention of the decodes and of the chunks: q [T, H, D] -> [T, H, D]."""
        out, count, sizes = torch.empty_like(q), x.sizes.decodes, x.sizes
        if count:
            results = sizes.own + self._most * sizes.shared
            work = DecodeWork(x.starts, x.own, x.shared, results)
            decode_attention(q[:count], *caches, x.tables[:count], x.lengths, work, out[:count])
        if sizes.tokens:
            prefill_attention(q[count:], *caches, x.tables[count:], x.work, out[count:])
        return out


class _Graph:
    """A captured step. The graphs of a runner share one memory pool: one runs at a time."""

    def __init__(self, runner: GpuRunner, sizes: Sizes):
        self.inputs, self.used = Inputs(sizes, runner.device), False
        self.graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in runner._captured.values()), None)
        # thread_local: a trainer may be at work in another thread
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = runner._compute(self.inputs)

    def replay(self) -> Outputs:
        self.used = True
        self.graph.replay()
        return self.outputs
