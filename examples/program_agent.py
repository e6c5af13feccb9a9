"""An agent as a program, one process for each attempt, with tasks of its own.

    python train.py --task.world "agent:python examples/program_agent.py" --warm_start.steps 0

It draws a sum from the seed of its attempt and reports the reward by a file.
"""

import json
import os
import random
import urllib.request

from openai import OpenAI

with urllib.request.urlopen(os.environ["NANORCHESTRA_ATTEMPT_URL"]) as reply:
    about = json.load(reply)  # "seed", and "split": train or held_out

rng = random.Random(about["seed"])
a, b = rng.randrange(100), rng.randrange(100)
policy = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are those of this attempt
messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
said = policy.chat.completions.create(model="policy", messages=messages).choices[0].message

right = (said.content or "").strip().rstrip(".").split(" ")[-1] == str(a + b)
with open(os.environ["NANORCHESTRA_REWARD_FILE"], "w") as file:
    json.dump(float(right), file)
