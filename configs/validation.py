"""When a run validates, on how many tokens at each length."""

import math

from configs.config import Config

SUBSET = 4  # of the fast profile: a quarter of the tokens, in a quarter of the validations


def validation_plan(config: Config, step: int) -> dict[int, int]:
    """Return how many tokens of each length to validate on before this step (at config.steps: after the last), or {}.

    The tokens are the first of the validation text. The last validation is the same in both profiles.
    """
    full = dict.fromkeys(config.val_lengths, config.val_tokens)
    if step == config.steps:
        return full
    if not config.val_every or step % config.val_every:
        return {}
    if config.val_profile == "paper":
        return full
    plan = {config.train_length: config.val_tokens}
    if step % (SUBSET * config.val_every) == 0:
        unit = math.lcm(*config.val_lengths)  # whole sequences of every length; it divides val_tokens
        subset = max(1, config.val_tokens // SUBSET // unit) * unit
        plan = dict.fromkeys(config.val_lengths, subset) | plan
    return {length: plan[length] for length in config.val_lengths if length in plan}
