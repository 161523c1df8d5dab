"""How methods look: one name, colour and line a method, in every figure and page."""

import os
import tempfile
from collections.abc import Iterable

from configs.config import Config

# Name, colour, line style and marker, as matplotlib calls them. The colours are Okabe and Ito's palette and two darker
# tones of Tol's, which colour-blind readers can tell apart; lines differ too, for print in grey. Ours is black, as in
# the paper.
SHOWN_AS = dict(
    rope=("RoPE", "#E69F00", "-", "o"),
    p_rope=("p-RoPE", "#56B4E9", "-", "s"),
    nope=("NoPE", "#999999", "-", "x"),
    rope_ntk=("RoPE+NTK", "#D55E00", "--", "o"),
    yarn=("YaRN", "#A6761D", ":", "o"),
    logn_rope=("LogN+RoPE", "#0072B2", "-", "^"),
    logn_p_rope=("LogN+p-RoPE", "#CC79A7", "-", "v"),
    logn_ntk=("LogN+NTK", "#882255", "--", "^"),
    alibi=("ALiBi", "#009E73", "-", "D"),
    scale_invariant_p_rope=("Scale-invariant p-RoPE", "#000000", "-", "*"),
    scale_invariant_rope=("Scale-invariant RoPE", "#555555", "--", "*"),
    scale_invariant_nope=("Scale-invariant NoPE", "#555555", ":", "*"),
    infini_rope=("Infini-RoPE", "#332288", "-", "P"),
    infini_p_rope=("Infini-p-RoPE", "#332288", "--", "P"),
)
NAMES = {method: shown[0] for method, shown in SHOWN_AS.items()} | {
    "fox": "FoX",
    "p_rope+forget": "FoX, p-RoPE",
    "scale_invariant+forget": "FoX, scale-invariant NoPE",
    "p_rope+scale_invariant+forget": "FoX, scale-invariant p-RoPE",
    "rnope_swa": "RNoPE-SWA",
    "swan": "SWAN",
    "llama4": "Llama 4",
    "scale_invariant_nope,rope+window,rope+window,rope+window": "Local RoPE, global scale-invariant NoPE",
    "scale_invariant_p_rope,rope+window,rope+window,rope+window": "Local RoPE, global scale-invariant p-RoPE",
    "p_rope+sink": "p-RoPE, sinks",
    "p_rope+scale_invariant+sink": "Scale-invariant p-RoPE, sinks",
    "p_rope+gate": "p-RoPE, gated output",
    "p_rope+scale_invariant+gate": "Scale-invariant p-RoPE, gated output",
    "p_rope+forget+gate": "FoX, p-RoPE, gated output",
    "alibi+gate": "ALiBi, gated output",
    "p_rope+forget,rope+window,rope+window,rope+window": "Local RoPE, global FoX with p-RoPE",
    "kerple_log": "KERPLE, logarithm",
    "kerple_power": "KERPLE, power",
    "nape": "NAPE, adaptive scaling",
    "pope": "PoPE",
    "pope+scale_invariant": "Scale-invariant PoPE",
    "pope+scale_invariant+gate": "Scale-invariant PoPE, gated output",
    "pope+alibi": "ALiBi, PoPE",
    "pope+forget": "FoX, PoPE",
    "pope+scale_invariant,pope+window,pope+window,pope+window": "Local PoPE, global scale-invariant PoPE",
    "fire": "FIRE",
    "stick_breaking": "Stick-breaking",
    "stick_breaking+gate": "Stick-breaking, gated output",
}
LINES = {method: shown[1:] for method, shown in SHOWN_AS.items()}
OPTION_NAMES = {
    "slope_scale=1": "official slopes",
    "learn_tau=True": "\u03c4 learned by each head",
    "learn_gain=True": "a factor of the scores learned by each head",
    "terms=a": "a_t alone",
    "terms=m": "m_t alone",
}
# Methods that are not listed take these in turn, a colour and a marker each and then the next dashes.
OTHERS = [
    (colour, dashes, marker)
    for dashes in ("-.", ":", "--")
    for colour, marker in zip(("#6699CC", "#CC6677", "#661100", "#999933", "#4B0092"), "osvD^")
]


FORM_LOOKS = (  # dashes and marker
    ("--", "P"),
    (":", "X"),
    ("-.", "d"),
    ((0, (5, 1, 1, 1, 1, 1)), "h"),
    ((0, (8, 2)), "p"),
    ((0, (1, 3)), "<"),
)


def method_name(method: str) -> str:
    return NAMES.get(method, method)


def choose_looks(methods: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Return colour, line style and marker of each method; those that are not listed share no look until there are too
    many, and have the same one whatever the order of the methods."""
    others = sorted({*methods} - {*LINES})
    return LINES | {method: OTHERS[i % len(OTHERS)] for i, method in enumerate(others)}


def series_label(config: Config) -> str:
    """Return what a row or line shows, as it is called in data: the method and the options that it was given."""
    options = config.method_options
    parts = [config.method, *(f"{option}={plain_number(options[option])}" for option in sorted(options))]
    return " ".join(parts)


def series_name(series: str) -> str:
    """Return a series (see series_label) as it is called in tables and legends."""
    method, *options = series.split(" ")
    return ", ".join([method_name(method), *map(option_name, options)])


def option_name(option: str) -> str:
    name, value = option.split("=", maxsplit=1)
    if name == "then":
        later, share = value.split("@")
        return f"after {share} of the steps {method_name(later)}"
    if name == "rewarmed":
        return f"learning rates anew over {value} steps"
    if name == "tau":
        return f"\u03c4 = {value}"
    return OPTION_NAMES.get(option, f"{name} {value}")


def plain_number(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def plot_style(series: str, shown: Iterable[str] = ()) -> dict:
    """Return keyword arguments of matplotlib's plot for this line, with its name for the legend; paler with options,
    with dashes and markers of their own where several forms of a method have some. shown: all series of the figure."""
    method, *options = series.split(" ")
    shown = {series, *shown}
    colour, style, marker = choose_looks(other.split(" ")[0] for other in shown)[method]
    forms = sorted(other for other in shown if other.startswith(f"{method} "))
    look = dict(color=colour, linestyle=style, marker=marker, label=series_name(series))
    if options:
        look |= dict(alpha=0.45)
    if options and len(forms) > 1:
        look |= dict(zip(("linestyle", "marker"), FORM_LOOKS[forms.index(series) % len(FORM_LOOKS)]))
    return look


def import_matplotlib():
    """Import matplotlib, so that it reads and writes nothing in the user's home: its settings and its list of fonts are
    in a temporary folder, or in MPLCONFIGDIR if that is set. To be called before any other import of it."""
    with tempfile.TemporaryDirectory() as folder:
        is_set = "MPLCONFIGDIR" in os.environ
        os.environ.setdefault("MPLCONFIGDIR", folder)
        try:
            import matplotlib.figure  # noqa: F401
        finally:
            if not is_set:
                del os.environ["MPLCONFIGDIR"]
