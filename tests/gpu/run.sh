#!/usr/bin/env bash
# Everything that needs a GPU: the tests, then the benchmarks on it. Run from the root of the repository:
#
#     tests/gpu/run.sh [OUT]             folder for logs and figures, gpu_out by default
#     PYTHON=.venv/bin/python tests/gpu/run.sh
#
# Goes on behind a failure, so that one call tells as much as it can, and fails at the end. About 10 minutes.
set -uo pipefail
python=${PYTHON:-python3}
out=${1:-gpu_out}
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=()

try() {
    local name=$1
    shift
    echo "=== $name: $*"
    timeout 300 "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

nvidia-smi > "$out/machine.log" 2>&1 || true
try tests "$python" -m pytest -m gpu tests/gpu -q -rs --durations=5
try write "$python" -m benchmarks.write --device cuda --mib 2048 --repeats 5 --json "$out/write.json"
try overlap "$python" -m benchmarks.overlap --device cuda --mb 10 100 500 --tensors 100 1000 5000 \
    --step-s 0.2 --repeats 2 --json "$out/overlap.json"
try overlap_small_pool "$python" -m benchmarks.overlap --device cuda --mb 500 --tensors 1000 \
    --step-s 0.5 --repeats 2 --buffer-mib 64 --json "$out/overlap_small_pool.json"

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
