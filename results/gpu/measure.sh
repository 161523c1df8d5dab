#!/usr/bin/env bash
# Measures what this page predicts, on one GPU. The most important numbers come first.
#   bash results/gpu/measure.sh speed 280       timings of kernels and steps, one at a time, in at most so many seconds
#   bash results/gpu/measure.sh curves 450      trains METHODS side by side for so many seconds; losses at 4k, 16k, 64k.
#                                               280 seconds are start, compilation and validation
#   bash results/gpu/measure.sh right           all code paths side by side, not timed (about 310 s on an H200)
# DOCS and BOOKS: folders of GPT-2 tokens (see docs/train.md). OUT: the folder for logs, runs and timings.
# DRY=1 tries this script with tiny models on a CPU. If .gpu/ holds text.tar.xz and ptxas.xz, they are unpacked first.
set -uo pipefail
cd "$(dirname "$0")/../.."
began=$SECONDS
export OUT=${OUT:-/tmp/gpu_out} W=${W:-/tmp/gpu_work}
export PYTHONUNBUFFERED=1 TQDM_DISABLE=1 TORCHINDUCTOR_CACHE_DIR=$W/inductor TRITON_CACHE_DIR=$W/triton
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
[ "${1:-}" = speed ] || export TORCHINDUCTOR_COMPILE_THREADS=4 # by default, each of the processes takes all cores
mkdir -p "$OUT" "$W/logs" "$W/bench"
rm -f "$W/failed"
python=${PYTHON:-python3}
since() { echo $((SECONDS - began)); }
say() { echo "[$(since) s] $*" | tee -a "$W/logs/all.txt"; }
# Logs are packed all the time, so a machine that is taken away in the middle leaves them.
pack() {
    local new=$OUT/logs.$BASHPID.tmp
    tar czf "$new" -C "$W" --exclude=checkpoints logs runs bench warm 2>/dev/null
    mv "$new" "$OUT/logs.tgz"
}
total=${2:-600}
start() { # NAME SECONDS COMMAND...: runs in the background, with a log and a time limit
    local name=$1 limit=$2 left=$((total - $(since) - 30)) # a run that is stopped saves first
    shift 2
    limit=$((limit < left ? limit : left))
    if [ -n "${DRY:-}" ]; then
        limit=2000 # a few slow cores
    elif [ $limit -lt 30 ]; then
        say "$name: no time left"
        return
    fi
    (
        began_job=$(since)
        timeout "$limit" "$@" >"$W/logs/$name.txt" 2>&1
        code=$?
        say "$name: exit $code after $(($(since) - began_job)) s"
        [ $code = 0 ] || touch "$W/failed"
    ) &
    jobs+=($!)
    [ -z "${DRY:-}" ] || join # one after the other
}
join() { [ ${#jobs[@]} = 0 ] || wait "${jobs[@]}"; jobs=(); } # a bare `wait` would wait for `packer`
losses() { # NAME...: prints train losses, validation losses and the backend of finished runs
    "$python" - "$W/runs" "$@" <<'P' | tee -a "$W/logs/all.txt"
import json, pathlib, sys
for name in sys.argv[2:]:
    folder = pathlib.Path(sys.argv[1]) / name
    if not (folder / "summary.json").exists():
        print(name, "did not finish")
        continue
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [round(line["train_loss"], 4) for line in lines if "train_loss" in line]
    summary = json.loads((folder / "summary.json").read_text())
    backend = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("attention by ")]
    kept = {key: summary[key] for key in ("val_loss", "val_loss_as", "copy_gain") if summary.get(key)}
    print(name, "train", train[:: max(1, len(train) // 6)], kept, *backend[:1])
P
}
jobs=()

"$python" -c "import torch._inductor.compile_fx, scipy.stats" & # a cold start reads a gigabyte
{ date; git rev-parse HEAD; cat .gpu/commit; nvidia-smi; uname -a; nproc; free -g; "$python" -m pip list; } >"$W/logs/machine.txt" 2>&1 &
if [ ! -e "$W/ready" ] && [ -e .gpu/text.tar.xz ]; then
    "$python" - "$W" <<'P' && touch "$W/ready" # a bare machine may lack xz
import lzma, pathlib, shutil, sys, tarfile
work = pathlib.Path(sys.argv[1])
tarfile.open(".gpu/text.tar.xz").extractall(work, filter="data")
with lzma.open(".gpu/ptxas.xz") as packed, open(work / "ptxas", "wb") as file:
    shutil.copyfileobj(packed, file)
(work / "ptxas").chmod(0o755)
P
fi
[ ! -e "$W/ptxas" ] || export TRITON_PTXAS_PATH=$W/ptxas
docs=${DOCS:-$W/docs} books=${BOOKS:-$W/books}
say "commit $(git rev-parse HEAD 2>/dev/null || cat .gpu/commit)"
[ -e "$docs" ] && [ -e "$books" ] || { say "No text in $docs or $books. Set DOCS and BOOKS to GPT-2 tokens."; exit 2; }
say "ready: $(nvidia-smi --query-gpu=name,memory.used,clocks.sm --format=csv,noheader 2>/dev/null || echo no GPU)"

tiny=() attention=() lengths=(4096 16384 65536) micro=32768 small=8192 val_tokens=262144
fused=(flex:plain cudnn:plain flash2:plain flex:alibi flex:si written:paper written:softcap)
if [ -n "${DRY:-}" ]; then
    tiny=(--device cpu --num_layers 1 --num_heads 1 --model_dim 64 --train_length 256 --compile off)
    attention=(--device cpu) lengths=(256 1024) micro=1024 small=512 val_tokens=4096
    fused=(flex:plain flex:alibi flex:si written:paper written:softcap)
fi
common=(--data_dir "$docs" --runs_dir "$W/runs" --val_every 0 --val_copy_gaps --val_tokens "$val_tokens" "${tiny[@]}")
train() { # NAME SECONDS TOKENS STEPS fields...: a short run of the paper's 162M model, one micro-batch a step
    local name=$1 limit=$2 tokens=$3 steps=$4
    shift 4
    rm -rf "${W:?}/runs/$name" # of an earlier call
    start "$name" "$limit" "$python" train_gpt.py small_4k --name "$name" "${common[@]}" --save_every 0 --steps "$steps" \
        --batch_tokens "$tokens" --micro_batch_tokens "$tokens" --val_lengths "${lengths[0]}" "$@"
}
time_step() { # PRESET SECONDS TOKENS arguments...
    local preset=$1 limit=$2 tokens=$3
    shift 3
    start "$kind-step_$preset" "$limit" "$python" -m scripts.bench step "$preset" "$@" --out "$W/$kind" \
        --data_dir "$docs" --batch_tokens "$tokens" --micro_batch_tokens $((tokens < micro ? tokens : micro)) "${tiny[@]}"
    finish
}
time_attention() { # NAME SECONDS arguments...
    local name=$1 limit=$2
    shift 2
    start "$kind-$name" "$limit" "$python" -m results.gpu.attention "$@" --out "$W/$kind/$name" "${attention[@]}"
    finish
}
finish() { # timings run one at a time, and the compilations before them side by side
    [ "$kind" = warm ] || join
}

(while sleep 20; do pack; done) >/dev/null 2>&1 &
packer=$!
trap 'kill $packer 2>/dev/null' EXIT

case ${1:?right, speed or curves} in
right)
    # 1. Training curves side by side: a wrong gradient shows as a curve that differs
    train si 200 $micro 20 --val_lengths "${lengths[@]}"
    train rope 200 $micro 20 --val_lengths "${lengths[@]}" --method rope --validate_as rope_ntk yarn
    train logn 200 $micro 20 --method logn_p_rope
    train alibi 200 $micro 20 --method alibi
    join
    losses si rope logn alibi
    # 2. Pairs of paths with the same seed and tokens, whose losses must agree
    flex=flex sdpa=sdpa
    [ -z "${DRY:-}" ] || flex=cpu
    start doctor 200 "$python" -m scripts.doctor gpt_162m_4k --data_dir "$docs" --val_tokens $((4 * val_tokens)) \
        --val_lengths "${lengths[@]}" "${tiny[@]}"
    train si_small 200 $small 12
    train si_blocks 200 $small 12 --attention_backend blocks --compile off
    train prope_sdpa 200 $small 12 --method p_rope --attention_backend $sdpa
    train prope_flex 200 $small 12 --method p_rope --attention_backend $flex
    train kerple 200 $small 12 --method kerple_log
    (   # SIGKILL in the middle, then resume: the end must equal si_small up to rounding
        run=("$python" train_gpt.py small_4k --name si_killed "${common[@]}" --steps 12 --batch_tokens $small
            --micro_batch_tokens $small --val_lengths "${lengths[0]}" --save_every 4 --resume auto)
        rm -rf "${W:?}/runs/si_killed"
        "${run[@]}" >"$W/logs/si_killed_1.txt" 2>&1 &
        first=$!
        for _ in $(seq 600); do
            [ ! -e "$W/runs/si_killed/checkpoints/step_000008.pt" ] || break
            kill -0 $first 2>/dev/null || break
            sleep 0.2
        done
        kill -9 $first 2>/dev/null
        timeout 150 "${run[@]}" >"$W/logs/si_killed_2.txt" 2>&1
        say "si_killed: resumed, exit $?"
    ) &
    jobs+=($!)
    join
    say "pairs: si_small, si_blocks, si_killed; prope_sdpa, prope_flex"
    losses si_small si_blocks si_killed prope_sdpa prope_flex kerple
    cat "$W/logs/doctor.txt"
    ;;
speed)
    # Compilation takes most of the time. So a first round compiles side by side, and fills the caches of the second.
    # The times of the first round are disturbed. They are all there is if the second does not end.
    tiles=(${TILES:-fwd-128-64-8-3 bwd-64-128-128-64-8-3 bwd-64-64-64-64-4-3}) # more are in attention.py
    tiles=("${tiles[@]/#/flex-}")
    tiles=(flex:si "${tiles[@]/%/:si}")
    [ -z "${DRY:-}" ] || tiles=(flex:si)
    for kind in warm bench; do
        rounds=5
        if [ $kind = warm ]; then
            rounds=1
            export TORCHINDUCTOR_COMPILE_THREADS=4
        fi
        time_step gpt_162m_4k 150 $((8 * micro)) p_rope scale_invariant_p_rope --steps 1 --rounds $rounds
        time_attention tiles 150 --lengths "${lengths[1]}" --rounds $rounds --variants "${tiles[@]}"
        time_attention kernels 150 --lengths "${lengths[@]::2}" --rounds $rounds --variants "${fused[@]}"
        if [ -z "${DRY:-}" ]; then
            micro=65536 time_step gpt_162m_64k 150 65536 scale_invariant_p_rope --steps 1 --rounds $rounds
            micro=57344 time_step gpt_304m_4k 150 57344 scale_invariant_p_rope --steps 1 --rounds $rounds
        fi
        join
    done
    unset TORCHINDUCTOR_COMPILE_THREADS
    [ -n "${DRY:-}" ] ||
        time_attention kernels_64k 100 --lengths "${lengths[2]}" --rounds 3 --variants flex:plain cudnn:plain flex:si
    cat "$W"/logs/bench-*.txt # what the first round printed is in logs.tgz alone
    ;;
curves)
    # Four runs share the GPU, so a run has a quarter of the tokens that the time allows.
    total=${2:-450} seed=${SEED:-0} batch=65536 size=32768
    [ -z "${DRY:-}" ] || batch=2048 size=1024 STEPS=${STEPS:-4}
    methods=(${METHODS:-rope logn_p_rope scale_invariant_p_rope scale_invariant_p_rope:form:barbero:share:0.25})
    # 280 s for start, check, compilation, validation and books; 25 % for taking turns on the GPU
    rate=${RATE:-300000} names=()
    steps=${STEPS:-$(((total - 280) * rate * 75 / 100 / ${#methods[@]} / batch))}
    if [ "$steps" -lt 4 ]; then
        say "$total seconds are too few for ${#methods[@]} methods. Give at least 330, or STEPS."
        exit 2
    fi
    say "$steps steps of $batch tokens for each of ${methods[*]}"
    for entry in "${methods[@]}"; do # METHOD or METHOD:OPTION:VALUE:...
        IFS=: read -ra parts <<<"$entry"
        name=curve-${entry//:/-}-s$seed extra=()
        names+=("$name")
        [ ${#parts[@]} = 1 ] || extra=(--method_options "${parts[@]:1}")
        [ "$entry" != rope ] || extra=(--validate_as rope_ntk yarn)
        rm -rf "${W:?}/runs/$name" "$W/logs/books-$name.txt" # of an earlier call
        # A stopped run saves, so its shell waits for it.
        run=("$python" train_gpt.py small_4k --name "$name" --method "${parts[0]}" --seed "$seed" "${common[@]}"
            --steps "$steps" --save_every 0 --batch_tokens $batch --micro_batch_tokens $size
            --val_lengths "${lengths[@]}" --val_tokens $((4 * val_tokens)) --val_copy_gaps ${GAPS-} "${extra[@]}")
        # A second kind of text, with long documents, as soon as this run ends.
        other=("$python" -m scripts.evaluate "$W/runs/$name" --data "$books" --lengths "${lengths[@]}"
            --val-tokens $((2 * val_tokens)))
        start "$name" "$total" bash -c "trap : TERM; ${run[*]@Q} && ${other[*]@Q} >${W@Q}/logs/books-$name.txt 2>&1"
    done
    join
    losses "${names[@]}"
    cat "$W"/logs/books-*.txt
    ;;
*)
    say "no such part: $1. Name right, speed or curves."
    exit 2
    ;;
esac
kill $packer
wait $packer 2>/dev/null
pack
say "end: everything is in $OUT/logs.tgz"
[ ! -e "$W/failed" ]
