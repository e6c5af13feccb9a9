"""An agent that our trainer does not know: a tool loop over OpenAI's client, in thirty lines.

python train.py --task.agent examples/openai_agent.py:play
"""

import json

from openai import OpenAI

TURNS = 10
client = OpenAI(base_url="http://127.0.0.1", api_key="none")  # one for all attempts


def play(attempt):
    """Returns the answer to the attempt's task."""
    policy = client.with_options(base_url=attempt.base_url, api_key=attempt.api_key)
    messages, tools = list(attempt.task["messages"]), attempt.task["tools"]
    for _ in range(TURNS):
        reply = policy.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or ""
        functions = [call.function for call in said.tool_calls]
        calls = [{"name": f.name, "arguments": json.loads(f.arguments)} for f in functions]
        for call, result in zip(said.tool_calls, attempt.call(calls), strict=True):
            content = result["content"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""
