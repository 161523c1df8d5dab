"""Submits the runs of a sweep as jobs to a cluster with Slurm, through submitit."""

import argparse
import dataclasses
from pathlib import Path

import submitit
from submitit.helpers import Checkpointable

from configs.runs import Run
from errors import UserError, require
from files import replace_text
from scripts.shared.arguments import key_values
from scripts.shared.states import sidecar
from scripts.sweep.local import train


@dataclasses.dataclass(frozen=True)
class Job(Checkpointable):
    """Trains a run when submitit calls this object on the cluster.

    submitit queues a Checkpointable again before Slurm takes the machine away. Then it raises SystemExit in __call__.
    """

    run: Run
    processes: int
    retries: int

    def __call__(self):
        train([self.run], 1, self.processes, self.retries, signals=())  # submitit handles the signals
        sidecar(self.run.path, ".job").unlink(missing_ok=True)


def submit(runs: list[Run], args: argparse.Namespace):
    """Submit each run as a job. args: the options of scripts.sweep. Raise ValueError for wrong --slurm options."""
    parameters = {f"slurm_{key}": value for key, value in key_values("--slurm", args.slurm).items()}
    minutes = parameters.get("slurm_time", 24 * 60)
    require(type(minutes) is int, f"--slurm time={minutes} is not a whole number. Give the time in minutes.")
    try:
        executor = submitit.AutoExecutor(args.runs_dir / "submitit" / "%j", cluster="slurm", slurm_max_num_timeout=20)
        executor.update_parameters(timeout_min=minutes, gpus_per_node=args.gpus_per_run, **parameters)
    except (RuntimeError, NameError) as error:
        raise UserError(str(error).splitlines()[0]) from error
    for run in runs:
        job = executor.submit(Job(run, args.gpus_per_run, args.retries))
        replace_text(sidecar(run.path, ".job"), job.job_id)
        print(f"{run.path.name}: job {job.job_id}")


def queued_job(path: Path) -> str | None:
    """Return the number of the run's Slurm job, or None if the run has no job or the job has ended."""
    if not (file := sidecar(path, ".job")).exists():
        return None
    job = submitit.SlurmJob(path.parent / "submitit" / "%j", file.read_text())
    return None if job.done(force_check=True) else job.job_id
