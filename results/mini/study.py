"""Our studies with the paper's presets: choices that it leaves open, tau, heads that learn, newer methods, needles.

The sweeps are for every scale. The kept runs are of scale mini: runs.jsonl, and ../prose/runs.jsonl on books.
"""

import collections
import math
import re

from configs.config import Config
from configs.presets import preset
from configs.runs import Run
from configs.sweeps import PAPER_SWEEPS, SI, Scale, forms, tau_option, with_needle
from model.methods.options import method_options
from results.mini.distances import needle_distances
from scripts.reproduce.drawing import Panel, draw_panels, row_lines
from scripts.reproduce.figures import OPEN_CIRCLE
from scripts.reproduce.needles import table_needle
from scripts.reproduce.study import Study
from scripts.reproduce.tables import table_losses
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import final_losses
from scripts.shared.tables import mean_cells, pivot_table, summarise

SCALE = ""
SI_POPE = "pope+scale_invariant"
BEST = [SI, "logn_p_rope", "alibi", "p_rope", "rope"]
# The newer methods, under the names that model/methods/__init__.py's canonical_name gives them.
RIVALS = """
fox p_rope+forget scale_invariant+forget p_rope+scale_invariant+forget rnope_swa
scale_invariant_nope,rope+window,rope+window,rope+window scale_invariant_p_rope,rope+window,rope+window,rope+window
p_rope+sink p_rope+scale_invariant+sink p_rope+gate p_rope+scale_invariant+gate p_rope+forget+gate alibi+gate
p_rope+forget,rope+window,rope+window,rope+window kerple_log kerple_power nape swan llama4
pope pope+scale_invariant pope+scale_invariant+gate pope+alibi pope+forget
pope+scale_invariant,pope+window,pope+window,pope+window fire stick_breaking stick_breaking+gate
""".split()

# ---- sweeps ----------------------------------------------------------------------------------------------------------


def open_runs(scale: Scale) -> list[Run]:
    """Return runs for each choice that the paper leaves open, and runs with a_t alone and m_t alone."""
    length, tau = preset(scale.base).train_length, tau_option(scale.scaled_tau)
    cases = [("rope", {}), ("yarn", {"stretch": 1.0})]  # YaRN without its scaling is RoPE
    cases += [("p_rope", {}), *(("p_rope", {"form": "barbero"} | share) for share in ({}, {"share": 0.75}))]
    cases += [("logn_p_rope", {}), ("logn_p_rope", {"context": "length"})]
    cases += [("alibi", {}), ("alibi", {"slopes": "geometric"})]
    cases += [("infini_rope", {}), *(("infini_rope", {"segment_length": length // n}) for n in (8, 2))]
    cases += [(SI, tau), (SI, tau | {"terms": "a"}), (SI, tau | {"terms": "m"})]
    return forms(scale.base, cases, scale.once)


def tau_runs(scale: Scale) -> list[Run]:
    """Return runs at three training lengths, with 1/16 to 64 times the scaled tau and with a learned tau."""
    options = [tau_option(scale.scaled_tau * factor) for factor in (1, 1 / 16, 1 / 4, 4, 16, 64)]
    options.append(tau_option(scale.scaled_tau) | {"learn_tau": True})
    cases = [(SI, chosen) for chosen in options]
    return [run for name in scale.lengths for run in forms(name, cases, scale.once)]


def head_runs(scale: Scale) -> list[Run]:
    """Return runs whose heads differ in tau or in a factor of the scores, and ALiBi for comparison.

    Heads learn tau or the factor. Or tau_ratio makes tau grow by 16, 64 or 256 from the first to the last head.
    """
    steps = preset(scale.base).num_heads - 1
    tau = tau_option(scale.scaled_tau)
    options = [{}, {"learn_tau": True}, {"learn_gain": True}]
    options += [{"tau_ratio": round(ratio ** (1 / steps), 4)} for ratio in (16, 64, 256)]
    cases = [(SI, tau | chosen) for chosen in options]
    for larger in (tau_option(scale.scaled_tau * 4), tau_option(scale.scaled_tau * 16)):
        cases += [(SI, larger), (SI, larger | {"learn_gain": True})]
    cases += [(SI_POPE, tau), (SI_POPE, tau | {"learn_gain": True}), ("alibi", {})]
    return forms(scale.base, cases, scale.seeds)


def rival_runs(scale: Scale) -> list[Run]:
    """Return runs of the newer methods and of the best methods of the paper."""
    # The kept runs at scale mini were trained with the scaled tau.
    tau = tau_option(scale.scaled_tau)
    cases = [(method, tau if "scale_invariant" in method else {}) for method in [*BEST, *RIVALS]]
    return forms(scale.base, cases, scale.seeds)


def needle_runs(scale: Scale) -> list[Run]:
    """Return runs with multiples of the scaled tau, with m_t alone, with a learned factor and with PoPE."""
    tau = tau_option(scale.scaled_tau)
    large = tau_option(scale.scaled_tau * 16)
    cases = [(SI, tau_option(scale.scaled_tau * factor)) for factor in (1, 4, 16, 64)]
    cases += [(SI, large | {"learn_gain": True}), (SI, tau | {"terms": "m"})]
    cases += [(SI_POPE, tau), (SI_POPE, large)]
    return forms(scale.base, cases, scale.seeds)


SWEEPS = dict(
    open_choices=open_runs,
    tau_by_length=tau_runs,
    scale_invariant_by_head=head_runs,
    table_rivals=rival_runs,
    needle_rivals=with_needle(rival_runs),
    needle_tau=with_needle(needle_runs),
    needle_distances=PAPER_SWEEPS["table_needle"],
)

# ---- what the paper leaves open --------------------------------------------------------------------------------------


def open_choices(study: Study) -> str:
    text = (
        "Choices that the paper leaves open, each beside ours: YaRN without scaling (equal to RoPE), p-RoPE in "
        "Barbero's form, LogN of the context length instead of the query's position, ALiBi's slopes in "
        "FlexAttention's form, shorter and longer segments, scale-invariant attention with a_t or m_t alone."
    )
    return f"{text}\n\n{table_losses(study)}"


# ---- tau by training length ------------------------------------------------------------------------------------------

# Validation length / training length, with keyword arguments of matplotlib's plot:
COLOURS = {1: "#E69F00", 4: "#56B4E9", 16: "#009E73", 64: "#0072B2"}
RATIOS = {ratio: dict(color=colour, marker="o", label=f"at {ratio}x") for ratio, colour in COLOURS.items()}
CIRCLES = {ratio: OPEN_CIRCLE | dict(color=colour, zorder=3) for ratio, colour in COLOURS.items()}
LEARNED = math.inf  # stands for tau in runs where every head learns its tau


def tau_of(config: Config) -> float:
    """Return the lengthscale of a run in tokens."""
    return float(config.method_options.get("tau", method_options(config.method)["tau"].default))


def tau_by_length(study: Study) -> str:
    """Draw the loss against tau for each training length. Return the Markdown with the table of losses."""
    # 1. The losses of all seeds at multiples of the training length.
    losses = collections.defaultdict(list)
    for run, stored in study.finished:
        tau = LEARNED if run.config.method_options.get("learn_tau") else tau_of(run.config)
        for length, loss in final_losses(stored.summary).items():
            ratio = length / run.config.train_length
            if ratio in RATIOS:
                losses[run.config.train_length, tau, ratio].append(loss)
    rows = summarise(dict(sorted(losses.items())), "train_length", "tau", "ratio")

    # 2. A panel and some lines of the table for each training length.
    panels, lines = [], []
    for length in dict.fromkeys(row["train_length"] for row in rows):
        of_length = [row for row in rows if row["train_length"] == length]
        fixed = [row for row in of_length if row["tau"] != LEARNED]
        once = [row for row in fixed if row["seeds"] == 1]
        curves = row_lines(fixed, "ratio", "tau", RATIOS) + row_lines(once, "ratio", "tau", CIRCLES)
        panels.append(Panel(f"trained at {length}", curves))
        lines += tau_lines(length, of_length)
    draw_panels(study.figure_path(), [panels], x="\u03c4 (tokens)", y="nats a token", log=10, sharey=True)

    # 3. The page.
    study.sections = learned_section(study)
    table = pivot_table(["trained at", "\u03c4", "\u03c4 / length", "seeds"], lines, {n: f"{n}x" for n in RATIOS})
    text = "Validation loss of scale-invariant p-RoPE (nats per token) against its lengthscale \u03c4 (tokens), at "
    text += "multiples of three training lengths. All models read equally many tokens. Bars: \u00b1 1 standard error "
    text += "over seeds. Open circles: one seed. Bold: the best \u03c4 for the training length."
    return "\n\n".join([text, study.figure_markdown(), table])


def tau_lines(length: int, rows: list[dict]) -> list[tuple[list[str], dict]]:
    """Return a line of the table for each tau. rows: the losses of one training length."""
    lines = {}
    for row in rows:
        tau = row["tau"]
        names = ["learned", ""] if tau == LEARNED else [f"{tau:.3g}", f"{tau / length:.2g}"]
        lines[tau] = ([str(length), *names, str(row["seeds"])], {})
    for ratio in RATIOS:
        numbers = {row["tau"]: (row["mean"], row["stderr"]) for row in rows if row["ratio"] == ratio}
        for tau, cell in mean_cells(numbers).items():
            lines[tau][1][ratio] = cell
    return [*lines.values()]


# ---- heads that learn, newer methods ---------------------------------------------------------------------------------

# Parameters that a head can learn (model/methods/scale_invariant.py), with the function from parameter to shown value.
PARAMETERS = dict(log_tau=math.exp, gain=float)


def scale_invariant_by_head(study: Study) -> str:
    """Return tables of scale-invariant p-RoPE with different heads: losses, and the parameters that heads learned."""
    page = table_losses(study)
    study.sections += learned_section(study)
    return page


def learned_section(study: Study) -> list[str]:
    """Return a section with the learned parameters of each head at the end of training."""
    cells = collections.defaultdict(dict)
    for run, stored in study.finished:
        for name, values in (stored.last("method_parameters") or {}).items():
            layer, parameter = re.fullmatch(r"blocks\.(\d+)\..*\.(\w+)", name).groups()
            heads = ", ".join(f"{PARAMETERS[parameter](value):.2f}" for value in values)
            cells[series_label(run.config), run.config.train_length, run.config.seed, parameter][int(layer)] = heads
    if not cells:
        return []
    lines = []
    for (series, train_length, seed, _), by_layer in cells.items():
        lines.append(([series_name(series), str(train_length), str(seed)], by_layer))
    layers = sorted({layer for found in cells.values() for layer in found})
    table = pivot_table(["method", "trained at", "seed"], lines, {layer: f"layer {layer + 1}" for layer in layers})
    text = "Learned by the heads of each layer, at the end of training: \u03c4 in tokens, or a factor of the scores."
    return ["### What heads learned", text, table]


def table_rivals(study: Study) -> str:
    study.trained_method_only = True
    return table_losses(study)


def needle_rivals(study: Study) -> str:
    study.trained_method_only = True
    return needle_tau(study)


def needle_tau(study: Study) -> str:
    """Return the shares of needles found as Markdown. A section lists them by distance."""
    if found := needle_distances(study):
        study.sections += ["### By distance", found]
    return table_needle(study)


ITEMS = dict(
    open_choices=open_choices,
    tau_by_length=tau_by_length,
    scale_invariant_by_head=scale_invariant_by_head,
    table_rivals=table_rivals,
    needle_rivals=needle_rivals,
    needle_tau=needle_tau,
    needle_distances=needle_distances,
)
NUMBERS = {}
TESTS = {}
