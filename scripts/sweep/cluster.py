"""The runs of a sweep as jobs of a cluster with Slurm, through submitit."""

import argparse
import dataclasses
from pathlib import Path

from configs.runs import Run
from errors import require
from files import replace_text
from scripts.shared.arguments import key_values
from scripts.shared.runs import sidecar
from scripts.sweep.local import train


@dataclasses.dataclass(frozen=True)
class Job:
    """A run on the cluster, as submitit calls it there."""

    run: Run
    processes: int
    retries: int

    def __call__(self):
        train([self.run], 1, self.processes, self.retries, stops=())  # submitit answers the signals

    def checkpoint(self):
        """Return the job to be queued again, which resumes. submitit calls this before the machine is taken away, and
        then leaves __call__ by SystemExit, which stops the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def slurm_parameters(pairs: list[str], executor: str) -> dict:
    """Return the parameters of --slurm. Raise ValueError unless they are KEY=VALUE, with the time in minutes."""
    require(not pairs or executor == "slurm", "--slurm needs --executor slurm")
    values = {key: int(v) if v.isdigit() else v for key, v in key_values("--slurm", pairs).items()}
    require(type(values.get("time", 0)) is int, f"--slurm time is in minutes, got {values.get('time')}")
    return values


def submit(runs: list[Run], args: argparse.Namespace, parameters: dict):
    """Submit each run as a job. args: of the command. parameters: of sbatch. Raise ValueError if submitit refuses."""
    import submitit

    try:
        executor = submitit.AutoExecutor(args.runs_dir / "submitit" / "%j", cluster="slurm", slurm_max_num_timeout=20)
        slurm = {f"slurm_{key}": value for key, value in parameters.items()}
        executor.update_parameters(timeout_min=24 * 60, gpus_per_node=args.gpus_per_run, **slurm)
    except (RuntimeError, NameError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    for run in runs:
        job = executor.submit(Job(run, args.gpus_per_run, args.retries))
        replace_text(sidecar(run.path, ".job"), job.job_id)
        print(f"{run.path.name}: job {job.job_id}")


def queued_job(path: Path) -> str | None:
    """Return the number of the run's Slurm job, None if there is none or it has ended."""
    import submitit

    file = sidecar(path, ".job")
    number = file.read_text() if file.exists() else None
    job = number and submitit.SlurmJob(path.parent / "submitit" / "%j", number)
    return number if job and not job.done(force_check=True) else None
