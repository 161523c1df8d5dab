"""What a person runs beside training."""

import sys

from configs.interrupt import ctrl_c_in_words

if sys.argv[0] == "-m":  # `python -m` is about to start one of these as a command, not a program importing it
    ctrl_c_in_words()
