"""Writes demonstrations as trajectories: the turns of a teacher in an environment."""

from collections.abc import Iterable

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.lessons import Lesson
from nanorchestra.agent.rebuild import Notes
from nanorchestra.model import chat
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.records import Trajectory, Turn


def demonstration(
    lessons: Iterable[Lesson], env: Environment, tokenizer: Tokenizer, prompt_tokens: int = 0
) -> Trajectory:
    """Returns a demonstration as the trajectory of a policy that says the same.

    It is one growing session, or with `prompt_tokens` every turn has a prompt of its own of at most
    so many ids (agent/rebuild.py). `lessons` may act in `env` as they are iterated over.
    """
    notes = Notes(tokenizer, env, prompt_tokens) if prompt_tokens else None
    t, context = Trajectory(env.task.id, 0), 0
    given = chat.encode(tokenizer, (notes or env).messages, env.tools)
    t.prompt_length = len(given)
    for lesson in lessons:
        calls = [lesson.call] if lesson.call else []
        said = chat.encode_assistant(tokenizer, lesson.thought, lesson.content, calls)
        t.ids += given + said
        t.sampled += [False] * len(given) + [True] * len(said)
        t.turns.append(Turn(len(t.ids) - len(said), len(t.ids), "stop", context=context))
        if not lesson.result:
            break
        if notes:
            if calls:
                notes.evidence.add(lesson.call, lesson.result)
            else:
                notes.hear(lesson.content, lesson.result)
            context, given = len(t.ids), chat.encode(tokenizer, notes.messages, notes.tools)
        else:
            role = "tool" if calls else "user"
            given = chat.encode_reply(tokenizer, role, [lesson.result.content])
    t.logprobs = [0.0] * len(t.ids)
    return t
