"""Time attention, or whole training steps, on this machine. A variant with wrong results is not timed.

python -m scripts.bench attention                                        attention alone
python -m scripts.bench step PRESET [VARIANT ...] [--field value ...]    whole training steps
"""

import sys
from pathlib import Path

from errors import exit_on_user_error, require
from scripts.bench import attention, step
from scripts.shared.arguments import Parser


def main():
    parser = Parser("python -m scripts.bench", __doc__)
    commands = parser.add_subparsers(metavar="attention | step", required=True)
    for name, module in {"attention": attention, "step": step}.items():
        command = commands.add_parser(name, about=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        command.add_argument("--rounds", type=int, default=7, help="rounds of measurement (default: 7)")
        command.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/DEVICE_....md and .json")
    with exit_on_user_error():
        args, args.fields = parser.parse_known_args()
        if args.fields and args.run is attention.run:
            parser.error(f"unrecognized arguments: {' '.join(args.fields)}")
        require(args.rounds >= 1, f"--rounds {args.rounds} measures nothing. Use at least 1.")
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
        sys.exit(args.run(args))


if __name__ == "__main__":
    main()
