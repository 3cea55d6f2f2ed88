#!/usr/bin/env bash
# Trains DynaKV and its controls for SmolLM2-135M on one GPU: train/dynakv_smollm2.sh OUT [ARM...]
# The same command goes on where it was stopped, and does nothing twice. What it needs and makes is
# said in docs/dynakv.md. PYTHON has kvjax and its [cuda] extra; MODEL is SmolLM2 if left out; COMMIT
# names the code where this is no checkout. It stops by itself after BUDGET seconds, with checkpoints.
set -uo pipefail
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-}
TEXT=${TEXT:-text.npy}     # rows of text, made by kvjax.train.corpus
READ=${READ:-}             # files that perplexity is measured on
SELF_ROWS=${SELF_ROWS:-8192} SELF_BATCH=${SELF_BATCH:-512} SELF_SECONDS=${SELF_SECONDS:-150}
LENGTH=${LENGTH:-1024} ROWS=${ROWS:-32}
LONG=${LONG:-1221} SHORT=${SHORT:-305} # steps of 32,768 tokens: 40 and 10 million
SAVE=${SAVE:-200} CALIBRATION=${CALIBRATION:-131072}
READ_TOKENS=${READ_TOKENS:-65536} WINDOW=${WINDOW:-2048}
JOBS=${JOBS:-3} # trainings at a time: while one compiles, the others compute
MEMORY=${MEMORY:-0.9} # share of the GPU's that it may take
BUDGET=${BUDGET:-3600}
READING=${READING:-200} # seconds of them that are left for what READ names
OUT=$1
shift
# What is compared with each other first, so that an end at any time leaves comparisons.
ARMS=${*:-dynakv-0.2 fixed-0.2 fisher-0.2 pca-0.2 palu-0.2 layer-0.2 dynakv-0.2-long dynakv-0.3 fixed-0.3
    fisher-0.3 pca-0.3 palu-0.3 layer-0.3 dynakv-0.3-long matryoshka dynakv-0.2-soft dynakv-0.2-soft-tau0.5
    dynakv-0.2-blocks dynakv-0.1 dynakv-0.5 pca-0.5 pca-0.1 palu-0.5 palu-0.1}
WIDTH=${WIDTH:-192} # components of a token's keys
CORPUS=$OUT/corpus.npy
mkdir -p "$OUT"
failed=0
LEAVE=30 # seconds that a training takes to stop with a checkpoint
END=$((BUDGET - LEAVE - (${#READ} ? READING : 0)))

left() { echo $((END - SECONDS)); }

finished() { [ -f "$OUT/$1/adapter.json" ] || [ -f "$OUT/$1/matryoshka.json" ]; }

run() { # NAME COMMAND...: says how it went
    local name=$1 started=$SECONDS code
    shift
    timeout --foreground -k "$LEAVE" "$(($(left) > 1 ? $(left) : 1))" "$@" >>"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code after $((SECONDS - started)) s"
    return $code
}

arm() { # NAME: trains it, or goes on with it
    local kind=${1%%-*} rate steps=$SHORT rank shared parts=1
    rate=$(cut -d- -f2 <<<"$1-")
    case $1 in
    *-long) steps=$LONG ;;
    pca-* | palu-*) steps=0 ;;
    esac
    [ "$kind" = matryoshka ] && parts=4 # a draw of ranks each
    shared=(--data "$CORPUS" --out "$OUT/$1" --resume --dtype bfloat16 --seq-len "$LENGTH"
        --batch-size "$((ROWS / parts))" --grad-accum "$parts" --steps "$steps" --warmup "$((SHORT / 10))"
        --save-every "$SAVE" --eval-rows "$ROWS" --calibration-tokens "$CALIBRATION")
    [ -z "$MODEL" ] || shared+=(--model "$MODEL")
    if [ "$kind" = matryoshka ]; then
        run "$1" "$PYTHON" -m kvjax.train.matryoshka "${shared[@]}" \
            --target-rate 0.5 0.3 0.2 --drops 64 --search-rows 4
        return
    fi
    shared+=(--eval-every "$SAVE" --no-remat --lr-u 5e-4 --lr-gate 3e-3 --lr-bias 0.2)
    # In the end gates are trained as they are used; "-soft" is the paper's training.
    [[ $kind != dynakv && $kind != layer || $1 = *-soft* ]] || shared+=(--harden 0.5 --tau 0.5)
    [[ $1 =~ -tau([0-9.]+) ]] && shared+=(--tau "${BASH_REMATCH[1]}")
    rank=$(awk "BEGIN { print int($rate * $WIDTH + 0.5) }")
    case $kind in
    dynakv)
        shared+=(--target-rate "$rate")
        [[ $1 = *-blocks* ]] && shared+=(--rank-multiple "$((WIDTH / 8))")
        ;;
    layer) shared+=(--gate layer --target-rate "$rate") ;;
    fixed | pca) shared+=(--gate fixed --key-rank "$rank" --value-rank "$rank") ;;
    palu | fisher) shared+=(--gate fixed --key-rank "$rank" --value-rank "$rank" --share-ranks fisher) ;;
    *) echo "no arm $1" >&2 && return 2 ;;
    esac
    run "$1" "$PYTHON" -m kvjax.train_dynakv "${shared[@]}"
}

export XLA_PYTHON_CLIENT_MEM_FRACTION=$MEMORY
# To try all kernels of a product takes minutes for each program, with several arms at a time; and a
# product that is kept for the gradient would be made twice, once into its place.
XLA_FLAGS=${XLA_FLAGS:---xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false}
export XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_dynamic_slice_fusion=false"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/programs}
if [ ! -f "$CORPUS" ]; then
    # What is there when its time is up is enough to go on with.
    timeout --foreground -k 30 "$SELF_SECONDS" "$PYTHON" -m kvjax.train.corpus --data "$TEXT" \
        --self-data "$SELF_ROWS" --batch-size "$SELF_BATCH" --seq-len "$LENGTH" \
        ${MODEL:+--model "$MODEL"} --out "$CORPUS" >>"$OUT/corpus.log" 2>&1
    echo "corpus: exit code $? after $SECONDS s: $(tail -n 1 "$OUT/corpus.log")"
    [ -f "$CORPUS" ] || exit 1
fi

XLA_PYTHON_CLIENT_MEM_FRACTION=$(awk "BEGIN { print $MEMORY / $JOBS }")
for name in $ARMS; do
    finished "$name" && continue
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
    [ "$(left)" -gt 20 ] || break
    arm "$name" &
done
wait
for name in $ARMS; do
    finished "$name" || { echo "$name: not finished" && failed=1; }
done

XLA_PYTHON_CLIENT_MEM_FRACTION=$MEMORY
END=$BUDGET
if [ -n "$READ" ] && [ "$(left)" -gt 60 ]; then
    declare -A folders=() # of each kind of arm: its name without the rate
    kinds=() found=()
    for name in $ARMS; do
        finished "$name" || continue
        kind=$(sed -E 's/-[0-9.]+//' <<<"$name")
        [ -n "${folders[$kind]:-}" ] || kinds+=("$kind")
        folders[$kind]+=,$OUT/$name
    done
    for kind in "${kinds[@]}"; do found+=("$kind=${folders[$kind]#,}"); done
    ((${#found[@]})) && run perplexity "$PYTHON" -m kvjax.eval.bench_dynakv --text $READ --arm "${found[@]}" \
        --tokens "$READ_TOKENS" --window "$WINDOW" --plot "$OUT/dynakv.png" \
        --out "$OUT/dynakv.json" ${MODEL:+--model "$MODEL"} ${COMMIT:+--commit "$COMMIT"} || failed=1
    grep -h ": rate\|^full" "$OUT/perplexity.log" | tail -n 200
fi
exit $failed
