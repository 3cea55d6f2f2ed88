#!/usr/bin/env bash
# Judges every recipe of eval/reasoner.yaml by the reasoner, most wanted first:
#   eval/reasoner.sh OUT [SECONDS] [JOBS]    answers, in JOBS processes a GPU, until SECONDS are over
#   eval/reasoner.sh OUT figures             figures and OUT/found/report.html of what is there
#   eval/reasoner.sh OUT list                what there is to do, in this order
# What is there when the time is over is kept, and the same command goes on; a part is a level and
# some recipes, and its rows are in OUT/parts. GPUs are those of CUDA_VISIBLE_DEVICES, else all.
# PARTS is a regular expression of what `list` shows, for a choice of it. Others: PYTHON, COMMIT
# (where this is no checkout), PROBLEMS (256 a level), BATCH (256), DTYPE (bfloat16).
set -uo pipefail
[ $# -gt 0 ] || { echo 'eval/reasoner.sh OUT [SECONDS] [JOBS]: name a folder' >&2; exit 2; }
OUT=$(realpath -m "$1")
cd "$(dirname "$0")/.."
LIMIT=${2:-3600} JOBS=${3:-8}
MODEL=eval/models/reasoner RECIPES=eval/reasoner.yaml
PYTHON=${PYTHON:-python3} PROBLEMS=${PROBLEMS:-256} BATCH=${BATCH:-256} DTYPE=${DTYPE:-bfloat16}
METHODS=(random rkv streaming snapkv_decode h2o tova)
FULL='full|last 256'

part() { # LEVEL NAMES: a regular expression
    echo "$1 $2"
}

each() { # LEVEL SIZE: of every method that evicts and fits nothing, two of them a process
    local i
    for ((i = 0; i < ${#METHODS[@]}; i += 2)); do
        part "$1" "(${METHODS[i]}|${METHODS[i + 1]}) $2"
    done
}

coded() { # LEVEL SIZE
    part "$1" "(random|rkv|snapkv_decode), int4 $2"
}

fitted() { # LEVEL SIZE
    part "$1" "(tam|pam|tam, int4) $2"
}

variants() { # LEVEL: of ThinKV
    part "$1" "thinkv, (strided|random tokens|by attention) 1/4"
    part "$1" "thinkv, (shared tokens|evicted tokens attended|floor [28]) 1/4"
    part "$1" "thinkv, (2 bits|k4v2|8 bits|prompt .*) 1/4"
    part "$1" "thinkv, segments of (32|64|256) 1/4"
    part "$1" "thinkv, stand-in kinds(|, 4 bits|, R8 E4 T2|, strided) 1/2 of the tokens"
    part "$1" "thinkv, stand-in kinds( in another order|, a third .*|, demoted .*|, for .*) 1/2 of the tokens"
}

matching() { # LEVEL ONCE: attention matching, and what becomes of it without its parts
    part "$1" "(random|rkv) 1/4 of the tokens"
    part "$1" "(tam|pam) 1/4 of the tokens"
    part "$1" "(tam|pam), once at $2"
    part "$1" "(tam|pam), nothing fitted"
    part "$1" "(random|rkv), fitted"
    part "$1" "snapkv_decode(, fitted| 1/4 of the tokens)"
    part "$1" "tam, (paper|released solver)"
    [ "$1" = 1000 ] || part "$1" "tam, every 512"
}

queue() {
    local level size
    for level in 1000 2000 4000; do part $level "$FULL"; done
    for level in 1000 2000; do
        each $level '1/2 of the tokens'
        part $level 'thinkv 1/2 of the tokens|thinkv 1/[48]'
    done
    for level in 1000 2000; do
        part $level 'int[248]|k4v2'
        part $level 'nvfp4|kivi[24]'
    done
    for level in 1000 2000; do
        for size in 1/4 1/8; do each $level $size; done
        for size in 1/8 1/16; do coded $level $size; done
    done
    for level in 1000 2000; do
        fitted $level '1/2 of the tokens'
        for size in 1/4 1/8; do fitted $level $size; done
        part $level 'thinkv 1/16|thinkv, fitted .*'
        part $level 'thinkv, paper .*'
    done
    each 4000 '1/2 of the tokens'
    part 4000 'thinkv 1/2 of the tokens|thinkv 1/4'
    part 4000 'int[48]'
    each 4000 1/8
    coded 4000 1/8
    coded 4000 1/16
    matching 1000 512
    variants 1000
    each 4000 1/4
    part 4000 'thinkv 1/(8|16)'
    part 4000 'k4v2|int2'
    coded 4000 1/32
    each 4000 1/16
    matching 2000 1024
    variants 2000
    part 4000 'thinkv, floor 2 1/32|thinkv, fitted .*'
    part 4000 'nvfp4|kivi[24]'
    part 4000 'thinkv, paper .*'
    for level in 1000 2000 4000; do
        part $level '.*, prompt not kept'
        each $level 1/2
        coded $level 1/4
    done
    for level in 1000 2000; do
        fitted $level 1/2
    done
    variants 4000
    matching 4000 2048
    for size in '1/2 of the tokens' 1/2 1/4 1/8 '(1/16|1/32)'; do fitted 4000 "$size"; done
    part 2000 'tam, int4 1/16'
}

chosen() {
    queue | grep -E -- "${PARTS:-.}"
}

reasoning() { # SECONDS OPTIONS...
    local limit=$1
    shift
    timeout --foreground -s TERM -k 15 "$limit" "$PYTHON" -m kvjax.eval.reasoning --quiet \
        --model $MODEL --tasks reasoner --recipes $RECIPES --problems "$PROBLEMS" \
        --dtype "$DTYPE" ${COMMIT:+--commit "$COMMIT"} "$@"
}

place() { # PART: its folder
    echo "$OUT/parts/${1//[^a-z0-9_]/-}"
}

is_done() { # PART: with these recipes
    [ "$(cat "$(place "$1")/done" 2>/dev/null)" = "$MARK" ]
}

answer() { # PART: in one process; one that is done is not looked at again
    local level=${1%% *} only=${1#* } batch=$BATCH left=$((END - $(date +%s))) started=$SECONDS code
    local place=$(place "$1")
    # What begins later has hardly a row when the time is over.
    if is_done "$1" || [ $left -le $((level / 25 + 30)) ]; then return; fi
    # H2O adds up the attention of all of a prompt's tokens while it is read, which takes room.
    [[ $1 == 4000*h2o* ]] && batch=$((batch < 128 ? batch : 128))
    [ -z "$GPUS" ] || export CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT % COUNT + 1)) <<<"$GPUS")
    mkdir -p "$place"
    reasoning $left --levels "$level" --only "$only" --batch-size "$batch" --out "$place" \
        >"$place/figures" 2>"$place/log"
    code=$?
    if [ $code = 0 ] || [ $code = 6 ]; then echo "$MARK" >"$place/done"; fi
    echo "$1: exit code $code after $((SECONDS - started)) s"
    cat "$place/figures"
    [ $code = 0 ] || tail -n 3 "$place/log" | cut -c1-200
}

gather() { # NAME RECIPES: a section of the page
    reasoning 600 --levels 1000,2000,4000 --gather "$OUT/parts" --only "$FULL|$2" \
        --out "$OUT/found/$1" | grep -v refused
}

case $LIMIT in
list) chosen ;;
figures)
    gather eviction '(random|streaming|h2o|tova|snapkv_decode|rkv|pam|tam|thinkv) 1/.*'
    gather bits 'int[248]|k4v2|nvfp4|kivi[24]|.*, int4 .*|(random|rkv|thinkv) 1/[0-9]*'
    gather matching '(tam|pam|random|rkv|snapkv_decode)(,.*| 1/4 of the tokens)|thinkv, fitted .*'
    gather thinkv 'thinkv(, paper|, fitted|, floor 2)? 1/.*'
    gather variants 'thinkv, .*'
    "$PYTHON" -m kvjax.eval.report "$OUT/found" --title 'What the reasoner finds'
    ;;
*)
    export END=$(($(date +%s) + LIMIT - 20)) XLA_PYTHON_CLIENT_PREALLOCATE=false
    # Programs run for seconds: searching for the fastest products would take longer than they do.
    export XLA_FLAGS=${XLA_FLAGS---xla_gpu_autotune_level=0}
    GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)
    GPUS=${CUDA_VISIBLE_DEVICES-$GPUS}
    commas=${GPUS//[^,]/}
    COUNT=$((${#commas} + 1))
    MARK=$(cksum <$RECIPES)
    export -f answer reasoning place is_done
    export MARK OUT MODEL RECIPES PYTHON PROBLEMS BATCH DTYPE GPUS COUNT
    chosen | xargs -d '\n' -n 1 -P $((JOBS * COUNT)) --process-slot-var=SLOT bash -c 'answer "$1"' _
    left=$(chosen | while read -r one; do
        is_done "$one" || echo "$one"
    done)
    [ -z "$left" ] || { echo "to go: $(wc -l <<<"$left") of $(chosen | wc -l) parts"; exit 1; }
    ;;
esac
