"""Groups for the trainer from a prompt and what follows it."""

from dataclasses import replace

from nanorchestra.training.packing import Group


def grouped(prompt, samples):
    """The group of samples that hold only what follows the prompt."""
    given = len(prompt)
    whole = [
        replace(
            sample,
            ids=prompt + sample.ids,
            loss_mask=[False] * given + sample.loss_mask,
            sampler_logprobs=[0.0] * given + sample.sampler_logprobs,
        )
        for sample in samples
    ]
    return Group(whole, given)
