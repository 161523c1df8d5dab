"""Stray files and errors of the disk: a command names the file, or it is not disturbed. test_fuzz.py damages files."""

import shutil

from commands import fails, fixture, parametrize, refuses, succeeds, table, update_json
from tiny_run import arguments

from data import shards
from runtime.checkpoint import list_checkpoints, load_checkpoint
from runtime.metrics import read_metrics
from scripts import evaluate
from train_gpt import main as train


@fixture
def folder(tiny_run, tmp_path):
    """A copy of the folder with `data` and `run`."""
    return shutil.copytree(tiny_run.parent, tmp_path / "copy")


@table("named, field, value", """
    letters_train_000001.bin | vocab_size | 9
    copy_rows                | copy_rows  | 5
""")
def test_a_manifest_of_the_wrong_shape_is_named_with_its_field(named, field, value, folder, capsys):
    """The vocabulary is smaller than the shard's."""
    update_json(folder / "data/manifest.json", **{field: int(value)})
    assert "manifest.json" in fails(capsys, named, shards.main, "verify", folder / "data")
    assert "manifest.json" in fails(capsys, named, train, *arguments(folder, "--name new"))
    assert not (folder / "new").exists()


@parametrize("content", ["5", '"x"', "[]", "null", "{", '{"dataset": "mine"}', "\udcff", "[" * 100_000])
def test_a_manifest_of_another_program_is_named(content, folder, capsys):
    (folder / "data/manifest.json").write_text(content, errors="surrogateescape")
    for command in "verify", "describe":
        fails(capsys, "manifest.json", shards.main, command, folder / "data")


def test_files_that_resemble_checkpoints_are_left_alone(folder, capsys):
    checkpoints = folder / "run/checkpoints"
    (newest, *_) = list_checkpoints(checkpoints)
    for name in ("step_1e3.pt", "step_.pt", "step_000500 (1).pt", "step_9.pt", "step_000900.pt.tmp", "step_-00009.pt"):
        (checkpoints / name).write_text("stray")
    (checkpoints / "step_000901.pt").mkdir()
    assert list_checkpoints(checkpoints)[0] == newest
    succeeds(evaluate.main, folder / "run")


READS = {
    "manifest.json": lambda path: shards.read_manifest(path.parent),
    "letters_train_000001.bin": shards.describe_shard,
    "metrics.jsonl": read_metrics,
    "step_000004.pt": load_checkpoint,
}


@parametrize("name", READS)
def test_an_error_of_the_disk_names_the_file(name, tmp_path):
    path = tmp_path / name
    path.symlink_to("/proc/self/mem")  # opens well, but reading its first byte is an input/output error
    with refuses(f"read .*{name}.*Input/output error", error=OSError):
        READS[name](path)
