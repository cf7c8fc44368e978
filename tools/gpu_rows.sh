#!/bin/bash
# The rows that need a GPU, in five stages of less than ten minutes on one H100:
#
#   OUT=out/gpu-1 tools/gpu_rows.sh 1        what is to be kept is written to $OUT
#   OUT=out/gpu-5 IN=out/gpu-4 tools/gpu_rows.sh 5
#
# 1: six miniatures and the tests marked gpu   2: what a step costs, by micro-batch, and the bench
# 3: the report's seeds that lack a record, as far as nine minutes go   4: nine minutes of resnet20-eps3
# 5: a run that is killed and goes on; and the rest of what stage 4 left in $IN
#
# MINI=1 runs every stage in miniature, on the CPU.
set -eu
stage=${1:?which stage, 1 to 5?}
out=${OUT:?set OUT, the folder to write to}
mini=${MINI:-}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$out/runs"
device=cuda
[ -z "$mini" ] || device=cpu

train() {  # a preset and its options; a miniature takes one step of its miniature
    local preset=$1; shift
    if [ -n "$mini" ]; then
        set -- --seed 0 --steps 1
        preset="${preset%-fast}-fast"
    fi
    "$python" -m dp_course.cli.main "$preset" --device $device --out "$out/runs" "$@" \
        >> "$out/said.txt" 2>&1
}

cost() {  # a preset and the images of a micro-batch: nothing is trained
    local preset=$1 images=$2
    [ -z "$mini" ] || { preset="$preset-fast"; images=8; }
    "$python" -m dp_course.cli.main "$preset" --device $device --dry-run --micro-batch "$images" \
        >> "$out/costs.txt" 2>&1
}

within() {  # seconds, and a command that is killed if it takes longer
    timeout -s KILL "$@" || case $? in 137) ;; *) return 1 ;; esac
}

case $stage in
1)
    nvidia-smi -L > "$out/gpu.txt" 2>&1 || echo "no GPU" > "$out/gpu.txt"
    for preset in digits-eps3 report-2048-fast resnet20-eps3-fast wrn16-4-eps3-fast \
                  public-all-eps2-fast oct-norms-eps8-fast; do
        train $preset --seed 0
        [ -z "$mini" ] || break
    done
    tests=${mini:+tests/cli/test_gpu.py}
    within 300 "$python" -m pytest -q -m gpu ${tests:-tests} > "$out/tests.txt" 2>&1 || true
    ;;
2)
    for images in 1024 8704 17408; do
        cost resnet20-eps3 $images
        [ -z "$mini" ] || break
    done
    [ -n "$mini" ] || cost wrn16-4-eps3 4352
    [ -n "$mini" ] || "$python" -m experiments.gpu --out "$out/gpu.json" >> "$out/costs.txt" 2>&1
    cases="resnet20-256 resnet20-16x16 wrn16_4-4x16"
    [ -z "$mini" ] || cases=""
    [ -z "$cases" ] || within 400 "$python" benchmarks/bench.py --quick --device $device \
        --cases $cases > "$out/bench.txt" 2>&1 || true
    ;;
3)
    began=$SECONDS
    while read -r preset images seed; do  # one after the other: a full GPU gains nothing by two
        left=$((540 - SECONDS + began))
        [ $left -gt 40 ] || break
        train $preset --seed $seed --micro-batch $images --time-limit $left
        [ -z "$mini" ] || break
    done <<< "report-wrn16-4 1088 1
report-wrn16-4 1088 2
report-ws-512 608 2"
    ;;
4)
    train resnet20-eps3 --seed 0 --micro-batch 8704 --time-limit 540
    ;;
5)
    if [ -n "$mini" ]; then
        train report-2048
        "$python" -m dp_course.cli.main report-2048-fast --device cpu --out "$out/runs" --resume \
            >> "$out/said.txt" 2>&1
        exit
    fi
    within 60 "$python" -m dp_course.cli.main report-2048 --seed 3 --micro-batch 2176 \
        --device $device --out "$out/runs" >> "$out/said.txt" 2>&1
    train report-2048 --seed 3 --resume --time-limit 60
    cp -r "${IN:?set IN, what stage 4 wrote}/runs/." "$out/runs"
    train resnet20-eps3 --seed 0 --resume --time-limit 400
    ;;
*)
    echo "stage is 1 to 5, not $stage" >&2
    exit 2
    ;;
esac
