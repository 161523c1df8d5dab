"""Compares two checkouts to the bit: config hashes of stored runs, and the losses of short runs.

    python -m results.compare_checkouts OLD NEW [--compile]        exit code 1 if a number differs

Each checkout trains every case for four steps on the same text of a Markov chain. Numbers differ between machines, so
nothing is stored: both checkouts run here. --compile: the cases are compiled, which takes minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TIMES = {"seconds", "val_seconds", "tokens_per_second", "peak_memory_mib"}
SMALL = "--vocab_size 64 --num_layers 3 --num_heads 2 --model_dim 32 --batch_tokens 320 --micro_batch_tokens 160"
SMALL += " --train_length 160 --steps 4 --cooldown_steps 1 --length_schedule --val_lengths 160 640 --val_tokens 1280"
SMALL += " --val_copy_gaps --val_far_windows 0 --val_every 1 --device cpu --seed 1"
MOMENTS = "learn_moments True tau 3 share 0.25"
CASES = [
    "quickstart",
    "quickstart --method rope --validate_as rope_ntk yarn --val_copy_gaps 32",
    "quickstart --dtype bfloat16 --method scale_invariant_p_rope+gate+sink",
    "taught",
    "taught --method logn_p_rope+xsa --method_options learn_share True base 64",
    f"taught --method scale_invariant_p_rope+xsa --method_options {MOMENTS}",
    "far",
    "far --method scale_invariant_p_rope --method_options learn_tau True learn_gain True skip_first True",
    "far --attention_backend blocks --length_schedule 40 1",
    "mini",
    "mini --method infini_p_rope,fox,log_beyond+gate",
    "mini --method alibi,kerple_power,bam,pope+scale_invariant",
    "mini --method nape,fire,stick_breaking,wall",
    "mini --method lssar,grape_ap,nape_entmax+gate,scale_invariant_nope --method_options terms a",
    "gpt_162m_4k --method scale_invariant_p_rope --method_options tau_ratio 2 terms m --dtype bfloat16",
]

DRIVER = """
import dataclasses, json, pathlib, sys
import torch
import train_gpt
from configs.config import config_hash
from configs.presets import preset

folder, cases = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
hashes = {}
for file in sorted(pathlib.Path("results").rglob("*.jsonl")):
    for number, line in enumerate(map(json.loads, file.read_text().splitlines())):
        if "preset" in line and "changes" in line:
            changes = line["changes"] | {key: line[key] for key in ("method", "method_options", "seed")}
            changes = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
            hashes[f"{file}:{number + 1}"] = config_hash(dataclasses.replace(preset(line["preset"]), **changes))
torch.set_num_threads(1)
metrics = {}
for number, case in enumerate(cases):
    torch._dynamo.reset()
    sys.argv = ["train_gpt.py", *case.split(), "--name", str(number), "--runs_dir", str(folder / "runs")]
    train_gpt.main()
    metrics[case] = (folder / "runs" / str(number) / "metrics.jsonl").read_text().splitlines()
(folder / "result.json").write_text(json.dumps([hashes, metrics]))
"""

TEXT = """
import pathlib, sys, numpy as np
from data.shard_writer import ShardWriter
tokens = [0]
rng = np.random.default_rng(0)
successors = rng.integers(64, size=(64, 3))
for choice in rng.choice(3, size=4999, p=[0.8, 0.15, 0.05]):
    tokens.append(successors[tokens[-1], choice])
with ShardWriter(pathlib.Path(sys.argv[1]), "chain", tokenizer="none", vocab_size=64) as writer:
    writer.write("train", tokens[:3000])
    writer.write("val", tokens[3000:])
    writer.close()
"""


def measure(checkout: Path, cases: list[str]) -> tuple[dict, dict]:
    """Return the hashes of the stored runs of a checkout by file and line, and the metrics of each case."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", DRIVER, folder, json.dumps(cases)]
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        hashes, metrics = json.loads((Path(folder) / "result.json").read_text())
    for case, lines in metrics.items():
        records = [json.loads(line) for line in lines]
        metrics[case] = [{k: v for k, v in record.items() if k not in TIMES} for record in records]
    return hashes, metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2, help="OLD and NEW")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        subprocess.run([sys.executable, "-c", TEXT, text], cwd=args.checkouts[0], check=True)
        more = f"{SMALL} --data_dir {text} --compile {'on' if args.compile else 'off'}"
        # Fields of the case come last, so they replace the small ones.
        cases = [" ".join([preset, more, *fields]) for preset, *fields in map(str.split, CASES)]
        old, new = (measure(checkout, cases) for checkout in args.checkouts)
    different = [key for key, stored in old[0].items() if new[0].get(key) != stored]
    for case, records in old[1].items():
        # Fields that only the new checkout records are no difference.
        again = new[1][case]
        shared = [{key: found.get(key) for key in record} for record, found in zip(records, again)]
        if shared != records or len(records) != len(again):
            different.append(case)
    print(f"{len(old[0])} hashes of stored runs, {len(old[1])} runs of four steps; {len(different)} differ")
    for key in different:
        print(f"differs: {key}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
