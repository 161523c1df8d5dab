"""The runs of a sweep as jobs of a cluster, through submitit."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from configs.sweeps import Run
from errors import require
from files import replace_file
from scripts.shared.arguments import key_values
from scripts.shared.runs import sidecar
from scripts.sweep.local import POLL, Attempt, may_retry, stop_requests


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that was handed to the cluster: what submitit calls there."""

    run: Run
    processes: int
    retries: int

    def __call__(self) -> str:
        """Train and fine-tune, try again what fails, and return how it ended (see record_outcome)."""
        while True:
            attempt = Attempt(self.run, {}, self.processes)
            try:
                attempt.process.wait()
            finally:
                attempt.stop()
            outcome = attempt.outcome()
            again = outcome == "failed" and may_retry(self.run.path, self.retries)
            if outcome != "pretrained" and not again:
                return outcome

    def checkpoint(self):
        """Return the job to be queued again, which resumes: called when the machine is about to be taken away."""
        from submitit.helpers import DelayedSubmission

        # submitit then leaves __call__ by SystemExit, which stops the run. To wait for that here, in a signal handler
        # inside Popen.wait, would be to wait for a lock that we hold.
        return DelayedSubmission(self)


def slurm_parameters(pairs: list[str], executor: str) -> dict:
    """Return what --slurm sets. Raises ValueError for what is not KEY=VALUE, and for a time that is not in minutes."""
    require(not pairs or executor != "local", "--slurm needs --executor slurm")
    values = {key: int(v) if v.isdigit() else v for key, v in key_values("--slurm", pairs).items()}
    require(type(values.get("time", 0)) is int, f"--slurm time is in minutes, got {values.get('time')}")
    return values


def submit(runs: list[Run], args: argparse.Namespace, parameters: dict):
    """Submit each run as a job; with Slurm return then, with "submitit-local" wait for them. args: those of the
    command; parameters: of sbatch."""
    import submitit

    on_slurm = args.executor == "slurm"
    gpus = args.gpus_per_run if on_slurm or torch.cuda.is_available() else 0
    try:
        executor = submitit.AutoExecutor(
            args.runs_dir / "submitit" / "%j", cluster="slurm" if on_slurm else "local", slurm_max_num_timeout=20
        )
        executor.update_parameters(
            timeout_min=24 * 60, gpus_per_node=gpus, **{f"slurm_{key}": value for key, value in parameters.items()}
        )
    except (RuntimeError, NameError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    submitted = []
    with stop_requests() as requests:
        for run in runs:
            submitted.append(executor.submit(Job(run, args.gpus_per_run, args.retries)))
            number = submitted[-1].job_id
            if on_slurm:
                replace_file(sidecar(run.path, ".job"), lambda file: file.write(number.encode()))
            print(f"{run.path.name}: job {number}")
        while not on_slurm and not requests and not all(job.done() for job in submitted):
            time.sleep(POLL)
        if requests and not on_slurm:
            for job in submitted:
                job.cancel()
            print("stopped; the same command resumes what is not finished", file=sys.stderr)
            sys.exit(130)


def queued_job(path: Path) -> str | None:
    """Return the number of the Slurm job that trains this run or will, None if there is none or it has ended."""
    import submitit

    file = sidecar(path, ".job")
    if not file.exists():
        return None
    number = file.read_text()
    return None if submitit.SlurmJob(path.parent / "submitit" / "%j", number).done(force_check=True) else number
