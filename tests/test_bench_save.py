"""python -m scripts.bench save: what a checkpoint costs."""

import json
import sys

from scripts.bench import save
from scripts.bench.__main__ import main

TIMED = ("copy", "save", "cpu", "load", "compare")


def test_a_table_of_what_was_saved_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "save", "mini", "--rounds", "2", "--out", str(tmp_path)])
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
    (row,) = json.loads((tmp_path / "cpu_save.json").read_text())["rows"]
    assert row["preset"] == "mini" and all(len(row[key]) == 2 for key in TIMED)
    assert min(sum((row[key] for key in TIMED), [])) > 0 and row["share"] == 0
    assert "| mini " in capsys.readouterr().out and "only at the end" in (tmp_path / "cpu_save.md").read_text()


def test_the_bytes_are_those_of_a_checkpoint(tmp_path, monkeypatch):
    sizes = []
    finish = save.BackgroundSaver.finish

    def measured(saver):
        if (path := finish(saver)) is not None:
            sizes.append(path.stat().st_size)
        return path

    monkeypatch.setattr(save.BackgroundSaver, "finish", measured)
    config = save.preset("quickstart")
    save.measure(config, tmp_path, 1)
    assert save.size_of(config) < sizes[0] < 1.02 * save.size_of(config)
