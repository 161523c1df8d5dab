"""The two tables of attention methods: mechanisms, and published methods, which are sets of mechanisms.

To add a mechanism, write a subclass of one of the kinds in base.py. Import it here, and add it to MECHANISMS. names.py
reads names of methods, options.py checks their options, and make.py makes them.
"""

import warnings

from model.methods.alibi import ALiBi
from model.methods.bam import BAM
from model.methods.fire import FIRE
from model.methods.forgetting import Forgetting
from model.methods.gate import SigmoidGate
from model.methods.grape import GrapeAP
from model.methods.infini import Infini
from model.methods.kerple import KerpleLog, KerplePower
from model.methods.logn import LogN
from model.methods.nape import AdaptiveScale, EntmaxOfHalfALiBi, HalfALiBi
from model.methods.ntk import NTK
from model.methods.p_rope import PRoPE
from model.methods.pope import PoPE
from model.methods.query_temperature import LogBeyondTraining, LogOffset, LogSteps
from model.methods.rope import RoPE
from model.methods.scale_invariant import ScaleInvariant
from model.methods.sharpness import Factor, LogRoot, Power
from model.methods.sink import LearnedSink
from model.methods.softplus import Softplus
from model.methods.stick_breaking import StickBreaking
from model.methods.wall import Wall
from model.methods.window import SlidingWindow
from model.methods.xsa import ExclusiveSelfAttention
from model.methods.yarn import YaRN

# `python -m model.methods.scale_invariant` runs a file that this file has imported. runpy warns of that.
warnings.filterwarnings("ignore", "'model.methods", RuntimeWarning, "runpy")

MECHANISMS = {
    "rope": RoPE,
    "p_rope": PRoPE,
    "ntk": NTK,
    "yarn": YaRN,
    "pope": PoPE,
    "logn": LogN,
    "log_beyond": LogBeyondTraining,
    "log_steps": LogSteps,
    "log_offset": LogOffset,
    "factor": Factor,
    "log_root": LogRoot,
    "n_power": Power,
    "adaptive": AdaptiveScale,
    "alibi": ALiBi,
    "half_alibi": HalfALiBi,
    "scale_invariant": ScaleInvariant,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "bam": BAM,
    "forget": Forgetting,
    "window": SlidingWindow,
    "sink": LearnedSink,
    "infini": Infini,
    "fire": FIRE,
    "stick_breaking": StickBreaking,
    "wall": Wall,
    "softplus": Softplus,
    "grape_ap": GrapeAP,
    "half_alibi_entmax": EntmaxOfHalfALiBi,
    "gate": SigmoidGate,
    "xsa": ExclusiveSelfAttention,
}

METHODS = {  # the published methods: the paper's 14 first
    "rope": "rope",
    "p_rope": "p_rope",
    "nope": "",
    "rope_ntk": "ntk",
    "yarn": "yarn",
    "logn_rope": "rope+logn",
    "logn_p_rope": "p_rope+logn",
    "logn_ntk": "ntk+logn",
    "alibi": "alibi",
    "scale_invariant_p_rope": "p_rope+scale_invariant",
    "scale_invariant_rope": "rope+scale_invariant",
    "scale_invariant_nope": "scale_invariant",
    "infini_rope": "rope+infini",
    "infini_p_rope": "p_rope+infini",
    "kerple_log": "kerple_log",
    "kerple_power": "kerple_power",
    "bam": "bam",
    "bam_ssmax": "logn+bam",
    "nape": "adaptive+half_alibi",
    "fox": "forget",
    "pope": "pope",
    "fire": "fire",
    "stick_breaking": "stick_breaking",
    "wall": "wall",
    "lssar": "rope+softplus",
    "grape_ap": "grape_ap",
    "nape_entmax": "adaptive+half_alibi_entmax",
    "swan": "log_beyond,rope+window,rope+window,rope+window",
    "llama4": "rope+window,rope+window,rope+window,log_steps",
    "rnope_swa": "nope,rope+window,rope+window,rope+window",
}
