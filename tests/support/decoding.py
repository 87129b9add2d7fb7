"""Continue prompts in batches and one by one."""

from collections.abc import Sequence
from itertools import chain

from neox_model.generate.batch import Batch, NewTokens, Request
from neox_model.generate.forward import Forward
from neox_model.generate.sampling import Sampling
from neox_model.scoring.scorer import Part, Score, Scorer

__all__ = ["continue_prompts", "scores_of"]


def continue_prompts(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    count: int,
    recompute: bool = False,
    together: bool = True,
) -> list[NewTokens]:
    """Return `count` tokens for every prompt, decoded together or one by one."""
    if not together:
        return [
            continue_prompts(forward, [prompt], [sampling], count=count, recompute=recompute)[0]
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    capacity = max(map(len, prompts)) + count
    batch = Batch(forward, slots=len(prompts), capacity=capacity, recompute=recompute)
    pairs = zip(prompts, samplings, strict=True)
    places = batch.admit(
        [Request(prompt=prompt, sampling=sampling, maximum_tokens=count) for prompt, sampling in pairs]
    )
    for _ in range(count - 1):
        batch.step()
    found = batch.read()
    return [found[place] for place in places]


def scores_of(scorer: Scorer, parts: Sequence[Part]) -> list[Score]:
    """Return the score of each part, in their order."""
    found = dict(chain.from_iterable(scorer.turns(parts)))
    return [found[number] for number in range(len(parts))]
