"""Names, colours and line styles of the methods, the same in every figure and page."""

import itertools
from collections.abc import Iterable

from configs.config import Config

# Name, colour, line style and marker, in matplotlib's notation. Colour-blind readers can tell the colours apart: they
# are the palette of Okabe and Ito, and two darker tones of Tol's. Line styles differ too, for print in grey.
SHOWN_AS = {
    "rope": ("RoPE", "#E69F00", "-", "o"),
    "p_rope": ("p-RoPE", "#56B4E9", "-", "s"),
    "nope": ("NoPE", "#999999", "-", "x"),
    "rope_ntk": ("RoPE+NTK", "#D55E00", "--", "o"),
    "yarn": ("YaRN", "#A6761D", ":", "o"),
    "logn_rope": ("LogN+RoPE", "#0072B2", "-", "^"),
    "logn_p_rope": ("LogN+p-RoPE", "#CC79A7", "-", "v"),
    "logn_ntk": ("LogN+NTK", "#882255", "--", "^"),
    "alibi": ("ALiBi", "#009E73", "-", "D"),
    "scale_invariant_p_rope": ("Scale-invariant p-RoPE", "#000000", "-", "*"),
    "scale_invariant_rope": ("Scale-invariant RoPE", "#555555", "--", "*"),
    "scale_invariant_nope": ("Scale-invariant NoPE", "#555555", ":", "*"),
    "infini_rope": ("Infini-RoPE", "#332288", "-", "P"),
    "infini_p_rope": ("Infini-p-RoPE", "#332288", "--", "P"),
}
LINES = {method: shown[1:] for method, shown in SHOWN_AS.items()}
# Names of methods, and of single mechanisms in a sum such as p_rope+forget+gate.
NAMES = {method: shown[0] for method, shown in SHOWN_AS.items()} | {
    "fox": "FoX",
    "rnope_swa": "RNoPE-SWA",
    "swan": "SWAN",
    "llama4": "Llama 4",
    "kerple_log": "KERPLE, logarithm",
    "kerple_power": "KERPLE, power",
    "nape": "NAPE, adaptive scaling",
    "pope": "PoPE",
    "fire": "FIRE",
    "stick_breaking": "Stick-breaking",
    "bam": "BAM",
    "bam_ssmax": "BAM, scalable softmax",
    "wall": "Wall attention",
    "factor": "scores \u00d7 factor",
    "log_root": "\u221a(1 + 2 log n)",
    "log_offset": "log(n + a)",
    "n_power": "power of n",
    "lssar": "Softplus with re-weighting",
    "grape_ap": "GRAPE-AP",
    "nape_entmax": "NAPE, entmax",
    "scale_invariant": "Scale-invariant NoPE",
    "forget": "forgetting",
    "gate": "gated output",
    "sink": "sinks",
    "xsa": "XSA",
}
OPTION_NAMES = {
    "slope_scale=1": "published slopes",
    "learn_tau=True": "\u03c4 learned by each head",
    "learn_factor=True": "factor learned by each head",
    "learn_gain=True": "a factor of the scores learned by each head",
    "learn_moments=True": "learned moments",
    "form=barbero": "fastest pairs",
    "skip_first=True": "not for key 0",
    "terms=a": "a_t alone",
    "terms=m": "m_t alone",
}
# Other methods, and methods with options, take these styles in turn.
OTHERS = [
    (colour, dashes, marker)
    for dashes in ("-.", ":", "--")
    for colour, marker in zip(("#6699CC", "#CC6677", "#661100", "#999933", "#4B0092"), "osvD^")
]


def method_name(method: str) -> str:
    """Return the name of a method in tables and legends."""
    layers = [(layer, len([*same])) for layer, same in itertools.groupby(method.split(","))]
    return "; ".join((f"{count} x " if count > 1 else "") + layer_name(layer) for layer, count in layers)


def layer_name(layer: str) -> str:
    first, *others = layer.split("+")
    prefix = "Scale-invariant " if "scale_invariant" in others else ""
    parts = [first, *(part for part in others if part != "scale_invariant")]
    return prefix + ", ".join(NAMES.get(part, part) for part in parts)


def series_label(config: Config, method: str | None = None) -> str:
    """Return a run's label in data files: its method (or one of validate_as), then OPTION=VALUE for each option."""
    options = (f"{option}={plain_number(value)}" for option, value in sorted(config.method_options.items()))
    return " ".join([method or config.method, *options])


def series_name(series: str) -> str:
    """Return the name in tables and legends of a series (see series_label)."""
    method, *options = series.split(" ")
    return ", ".join([method_name(method), *map(option_name, options)])


def option_name(option: str) -> str:
    name, value = option.split("=", maxsplit=1)
    shown = {"tau": f"\u03c4 = {value}", "slope_scale": f"slopes \u00d7 {value}"}
    return OPTION_NAMES.get(option, shown.get(name, f"{name} {value}"))


def plain_number(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plot_styles(shown: Iterable[str]) -> dict[str, dict]:
    """Return the arguments of matplotlib's plot by series or method. Their order in a figure has no effect.

    The first series of a method, by alphabet, looks like the method if the method itself is not shown.
    """
    shown, lines = [*shown], dict(LINES)
    first_of = {}  # the first series of each method, by alphabet
    for series in sorted(shown):
        first_of.setdefault(series.split(" ")[0], series)
    for method, series in first_of.items():
        if method in LINES and method not in shown:
            lines[series] = LINES[method]
    others = [series for series in sorted({*shown}) if series not in lines]
    lines |= dict(zip(others, itertools.cycle(OTHERS)))

    styles = {}
    for series in shown:
        color, linestyle, marker = lines[series]
        styles[series] = {"color": color, "linestyle": linestyle, "marker": marker, "label": series_name(series)}
    return styles
