#!/usr/bin/env bash
# Checks and times everything that needs a GPU: eval/gpu.sh OUT [PART...]
# Figures go to OUT as JSON, what is said to OUT/PART.log. PYTHON has kvjax and its [cuda] extra;
# COMMIT names the code where this is no checkout. All parts together take about an hour. A part that
# fails or takes too long does not stop the next one; what asks for the Mosaic kernel fails where the
# GPU is no Hopper.
set -uo pipefail
PYTHON=${PYTHON:-python3}
OUT=$1
shift
METHODS=${METHODS:-full uniform rkv rkv-gathered thinkv} # that decode is timed with
PARTS=${*:-launches tests sanitizer kernels decode latents thinkv tam training scale}
mkdir -p "$OUT"
failed=0

run() { # NAME SECONDS COMMAND...: says how it went
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    timeout "$limit" "$@" >>"$OUT/$name.log" 2>&1
    local code=$?
    echo "$name: exit code $code after $((SECONDS - started)) s: ${*: -6}"
    [ $code -eq 0 ] || failed=1
}

bench() { # NAME SECONDS MODULE ARGUMENTS...
    local name=$1 limit=$2 module=$3
    shift 3
    run "$name" "$limit" "$PYTHON" -m "kvjax.eval.$module" ${COMMIT:+--commit "$COMMIT"} "$@"
}

for part in $PARTS; do
    case $part in
    launches) run launches 300 "$PYTHON" -m tests.gpu.trial --groups first launches ;;
    tests) run tests 1500 "$PYTHON" -m pytest -q -m gpu tests/gpu ;;
    sanitizer)
        XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer= \
            run sanitizer 600 compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$PYTHON" -m pytest -q -m gpu tests/gpu -k sanitizer
        ;;
    kernels)
        bench kernels 600 bench_kernels --implementation mosaic --repeats 7 \
            --out "$OUT/kernels.json"
        bench kernels 600 bench_kernels --implementation triton --no-others --warps 2 8 \
            --repeats 7 --out "$OUT/kernels_triton.json"
        ;;
    decode) # each in a process of its own, so that its peak of memory is its own
        export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
        for method in $METHODS; do
            bench decode 900 bench_decode --context 32000 --budget 1024 --repeats 3 \
                --methods "$method" --batch 1 8 32 128 256 0 --out "$OUT/decode_$method.json"
        done
        # With fewer rows than it is chosen for by itself.
        bench decode 900 bench_decode --context 32000 --budget 1024 --repeats 3 --kernel mosaic \
            --methods thinkv --batch 32 128 --out "$OUT/decode_thinkv_mosaic.json"
        ;;
    latents) bench latents 300 bench_latents --codecs bf16 int4 --out "$OUT/latents.json" ;;
    thinkv) bench thinkv 600 bench_thinkv --out "$OUT/thinkv_overhead.json" overhead --segments 2 ;;
    training) # as train/dynakv_smollm2.sh has it compiled
        XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false \
            --xla_gpu_enable_dynamic_slice_fusion=false" \
            bench training 300 bench_training --profile --out "$OUT/training.json"
        ;;
    tam) bench tam 600 bench_tam --out "$OUT/tam_time.json" time ;;
    scale) # two GPUs, of which first each times one method by itself
        export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(mktemp -d)}
        CUDA_VISIBLE_DEVICES=0 bench scale_full 300 bench_scale --out "$OUT/scale_one_full.json" \
            one --methods full &
        CUDA_VISIBLE_DEVICES=1 bench scale_thinkv 300 bench_scale --out "$OUT/scale_one_thinkv.json" \
            one --methods thinkv &
        wait
        for method in full thinkv; do
            bench scale 400 bench_scale --out "$OUT/scale_dp_$method.json" dp --batch 32 \
                --methods "$method"
            bench scale 400 bench_scale --out "$OUT/scale_tp_$method.json" tp --methods "$method"
        done
        bench scale 300 bench_scale --out "$OUT/scale_train.json" train
        ;;
    *)
        echo "no part $part: launches tests sanitizer kernels decode latents thinkv tam training scale" >&2
        exit 2
        ;;
    esac
done
exit $failed
