"""Make the tables of a factorial: three score rules (p-RoPE, LogN, scale-invariant) with the same rotations.

It asks for the cause of reading far: a_t and m_t, or the rotation. The four tests were fixed before their runs.
"""

from configs.sweeps import SI
from scripts.reproduce.beyond import GAP_RATIOS, reach_tables
from scripts.reproduce.comparisons import paired_rows, paired_section
from scripts.reproduce.study import BySeed, Study, at
from scripts.shared.runs import copy_gains, final_losses

RIVALS = ["logn_p_rope", "p_rope"]
FAST_OPTIONS = "form=barbero share=0.25"
# At `taught`, seed 0 of the rivals with the fast rotation was known when the tests were fixed.
KNOWN_SEEDS = dict(taught=[0], far=[])


def rotation(study: Study) -> str:
    """Return the tables as Markdown. A section has the tests."""
    losses, gains = study.by_seed(final_losses), study.by_seed(copy_gains)
    left_out = KNOWN_SEEDS[study.scale]
    note = "These tests were fixed before their runs." + (" Seed 0 was known, and is left out." if left_out else "")
    study.sections = paired_section("### Tests", SI, tests(study), "nats a token", note)
    text = "Loss: nats per token on natural text, by sequence length. Copy gain: loss of 32 random tokens minus the "
    text += "loss of their second copy. Mean \u00b1 standard error over seeds."
    return "\n\n".join([text, *reach_tables(study, losses, gains, GAP_RATIOS)])


def tests(study: Study) -> list[dict]:
    """Return the rows of the four tests, in the loss at 16 training lengths: see paired_rows.

    Two tests compare the rules with the fast rotation. Two tests compare the changes of the loss from the published to
    the fast rotation, which are the interactions of rule and rotation.
    """
    far_losses = at(study.by_seed(final_losses), 16 * study.base_length)
    fast: dict[str, BySeed] = {}
    change: dict[str, BySeed] = {}
    for rule in [SI, *RIVALS]:
        published = far_losses.get(rule, {})
        fast[rule] = far_losses.get(f"{rule} {FAST_OPTIONS}", {})
        change[rule] = {seed: loss - published[seed] for seed, loss in fast[rule].items() if seed in published}
    measures = {"loss with the fast rotation": fast, "change from the published to the fast rotation": change}
    return paired_rows(SI, RIVALS, measures, KNOWN_SEEDS[study.scale])
