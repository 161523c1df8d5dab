"""Speed, side by side, on this machine.

    python -m scripts.bench step PRESET [VARIANT ...] [--field value ...]     whole training steps, ours and others'
    python -m scripts.bench attention                                         attention alone
    python -m scripts.bench project [PRESET ...]                              hours, communication and GPUs, computed
    python -m scripts.bench save [PRESET ...]                                 what checkpoints cost

`python -m scripts.bench step --help` explains the first, scripts/bench/attention.py, project.py and save.py the others.
"""

import argparse
import sys

from errors import exit_on_user_error
from scripts.bench import attention, project, save, step


def main():
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="step | attention | project | save", required=True)
    for name, module in dict(step=step, attention=attention, project=project, save=save).items():
        first_line, _ = module.__doc__.split("\n", maxsplit=1)
        text = dict(help=first_line, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        command = commands.add_parser(name, allow_abbrev=False, **text)
        module.add_arguments(command)
        command.set_defaults(run=module.run, fields=[])
    args, fields = parser.parse_known_args()
    if fields and not hasattr(args, "preset"):
        parser.error(f"unrecognized arguments: {' '.join(fields)}")
    args.fields = fields
    with exit_on_user_error():
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
        sys.exit(args.run(args))


if __name__ == "__main__":
    main()
