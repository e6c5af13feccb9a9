"""A running server. The model babbles, unless the last message names a line of the script."""

from __future__ import annotations

import math
import socket
import threading
import time

from invariants import check_scheduler
from scripted import EchoTool

from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Rollout
from nanorchestra.config import RolloutSection
from nanorchestra.engine.sampler import Draw
from nanorchestra.records import Task
from nanorchestra.serving.api import Server

CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'
ABOUT = {
    "about": "One tool.",
    "examples": ["!ask"],
    "outside": "Ask like this.",
    "tools": [{"name": "echo", "description": "says it again", "price": "$0.25 per call"}],
}
SCRIPT = {
    "say": "<think>\nhmm\n</think>\n\nAnswer: fourty-two, or so.<|im_end|>",
    "call": f"<think>\nhmm\n</think>\n\n{CALL}\n{CALL}<|im_end|>",
    "ask": f"<think>\nhmm\n</think>\n\n{CALL}<|im_end|>",
    "open": "hmm\n</think>\n\nAnswer<｜end▁of▁sentence｜>",
    "poison": "",
}


def scripted(engine):
    """Replaces the draws of the requests whose prompt names a line of the script."""
    read, tokenizer = engine.runner.read, engine.tokenizer

    def line(request):
        prompt = tokenizer.decode(request.ids[: request.prompt_tokens])
        last_message = prompt.rpartition("<|im_start|>user\n")[2]
        if "<tool_response>" in last_message:
            return SCRIPT["say"]
        return next((text for word, text in SCRIPT.items() if f"!{word}" in last_message), None)

    def scripted_read(launched):
        drawn = read(launched)
        for request in drawn:
            text, count = line(request), len(request.ids) - request.prompt_tokens
            if text == "":
                drawn[request] = Draw(0, math.nan)
            elif text is not None:
                token = tokenizer.backend.encode(text, add_special_tokens=False).ids[count]
                drawn[request] = Draw(token, -0.5, [(token, -0.5)] * request.params.top_logprobs)
        return drawn

    engine.runner.read = scripted_read
    return engine


def wait(condition, seconds=20):
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


class Running:
    """A server in a thread, and what it is asked. `preferences` are those of its environments.

    `data` is that of their tasks, which stand alone if there is any.
    """

    names, examples, alone = "echo", ["!ask"], False

    def open(self, question, preference, seed):
        """An attempt with the tool."""
        self.preferences.append(preference)
        preference.check_names("metadata", ["echo"])
        task = Task("asked", question, preference, data=self.data)
        return ToolEnvironment(task, [self.tool], lambda answer: 0.0)

    def facts(self):
        """What the page says."""
        return ABOUT

    def __init__(self, engine, tool=None, **settings):
        self.preferences, self.data, self.tool = [], {}, tool or EchoTool()
        limits = RolloutSection(turns=8, turn_tokens=200, context_tokens=400)
        rollout = Rollout(engine, engine.tokenizer, None, limits)
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        self.server = Server(rollout, "nano", self, defaults, **settings)
        listening = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.engine, self.service = engine, self.server.service
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        wait(lambda: self.server.started)

    def stop(self):
        """Ends it as a signal does."""
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def assert_idle(self):
        """No request is left, and no page is held."""
        wait(lambda: not self.service.live and not self.engine.has_work)
        check_scheduler(self.engine.scheduler)
        assert self.engine.blocks.available == self.engine.blocks.num_pages
