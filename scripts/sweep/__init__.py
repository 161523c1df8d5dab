"""Trains the runs of a sweep, on this machine (local.py) or on a cluster (cluster.py).

What a run is called here and in the other scripts, from the wish to the process:
    Run           what is to be trained: a preset, the fields that differ from it, and the fine-tuning that follows, if
                  any (configs/sweeps.py)
    StoredRun     what a run folder on disk holds (scripts/shared/runs.py)
    PlannedRun    a Run, the state that it is in, and what the sweep does about it (plan.py)
    Attempt       one process that trains or fine-tunes a Run (local.py)
    Job           a Run that was handed to a cluster (cluster.py)
"""
