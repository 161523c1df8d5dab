"""From text to token shards (text, fineweb), to one stream of tokens (shards), to the batch of a step (loader)."""

import sys

from configs.interrupt import exit_on_ctrl_c

if sys.argv[0] == "-m":  # `python -m` is about to start one of these as a command, not a program importing it
    exit_on_ctrl_c()
