"""One HTML page over any set of runs: table, curves, losses by length and position, configs compared, problems.

    python -m scripts.report                                      all runs in runs/, into report.html
    python -m scripts.report runs/mini-*/ --out mini.html --title "mini, 3 seeds"

The page holds its data, styles and scripts, and asks for nothing else: it opens from any disk, without a network.
Python writes its tables and charts, which are there without JavaScript too; page.js sorts, filters and hides.
"""

import argparse
from pathlib import Path

from errors import exit_on_user_error, require
from files import replace_file
from scripts.report.reading import describe_run, find_runs
from scripts.shared.looks import import_matplotlib
from scripts.shared.runs import require_as_many_runs


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: all in --runs-dir)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the run folders are")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--title", default="Training runs", help="its title")
    parser.add_argument("--force", action="store_true", help="write over a page that was made from more runs too")
    args = parser.parse_args()
    import_matplotlib()
    from scripts.report.page import make_page, problem_list

    with exit_on_user_error():
        for path in args.runs:
            hint = f" (for all runs in it: --runs-dir {path})" if path.is_dir() else ""
            require((path / "config.json").exists(), f"{path} is not a run folder: it has no config.json{hint}")
        require(not args.out.is_dir(), f"--out {args.out} is a folder: name the page in it, {args.out / 'report.html'}")
        paths, strays = (args.runs, []) if args.runs else find_runs(args.runs_dir)
        if not args.force:
            require_as_many_runs(args.out, r"^<p>(\d+) runs: ", len({*paths}))
        runs = [describe_run(path) for path in dict.fromkeys(paths)]
        text = make_page(args.title, runs, strays)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(args.out, lambda file: file.write(text.encode()))
    print(f"{args.out}: {len(runs)} runs, problems: {len(problem_list(runs, strays))}, {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
