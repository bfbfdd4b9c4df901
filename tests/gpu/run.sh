#!/usr/bin/env bash
# Run everything that needs a GPU, and keep what comes of it.
#
#   tests/gpu/run.sh WHEELS OUT [SECONDS]
#
# WHEELS: a folder of wheels that the machine may lack (see README.md beside this file); it may be empty.
# OUT:    gets summary.txt, logs/, results/ (tables of the benchmarks), parts/ (of those that were cut off) and fixtures/.
# SECONDS: for all together, 540 unless told otherwise. A part that does not fit is cut off, and the summary says so.
# PARTS, in the environment, names the parts to run, with spaces between them ("fixtures pytest"), or is "all"; DEFAULT,
# whose limits fit SECONDS, unless told otherwise.
# BENCH, likewise, holds further options of the benchmarks ("--quick").
#
# No network is used, and nothing is installed: what is missing is unpacked into a folder that is removed again.
set -uo pipefail

[ $# -ge 2 ] || { sed -n '2,16p' "$0"; exit 2; }
repository=$(cd "$(dirname "$0")/../.." && pwd)
wheels=$(cd "$1" && pwd) || exit 2
mkdir -p "$2/logs" "$2/results" "$2/fixtures" || exit 2
out=$(cd "$2" && pwd)
end=$((SECONDS + ${3:-540}))
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

cd "$repository" || exit 2
"$python" tests/gpu/entry_points.py "$site" "$wheels" >"$out/logs/setup.txt" 2>&1 || { cat "$out/logs/setup.txt"; exit 2; }
export PYTHONPATH="$site:$repository:$repository/collectors${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR="$site/inductor" TRITON_CACHE_DIR="$site/triton"

DEFAULT="machine doctor device_line bare gpu_advice gpu_tiles gpu_share pytest"

: >"$out/summary.txt"
: >"$out/summary.begun"
failed=0

# part NAME SECONDS COMMAND…: run it in its own and in the whole time, and note how it ended
part() {
    local name=$1 limit=$2 left begin code
    shift 2
    [[ "${PARTS:-$DEFAULT}" != all && " ${PARTS:-$DEFAULT} " != *" $name "* ]] && return
    left=$((end - SECONDS))
    if [ "$left" -lt 5 ]; then
        echo "$name: not run, out of time" | tee -a "$out/summary.txt"
        failed=1
        return
    fi
    [ "$left" -lt "$limit" ] && limit=$left
    begin=$SECONDS
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/logs/$name.txt" 2>&1
    code=$?
    case $code in
    0) echo "$name: well, $((SECONDS - begin)) s" ;;
    124 | 137) echo "$name: cut off after $limit s" ;;
    *) echo "$name: exit status $code after $((SECONDS - begin)) s: $(tail -n 1 "$out/logs/$name.txt" | cut -c1-200)" ;;
    esac | tee -a "$out/summary.txt"
    [ "$code" -eq 0 ] || failed=1
}

bench() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" "benchmarks/$name.py" --save --partial "$out/parts" --patience 1 "$@" ${BENCH:-}
    find benchmarks/results -name "$name*.json" -newer "$out/summary.begun" -exec cp {} "$out/results/" \;
}

part machine 20 "$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))'
part doctor 20 "$python" -m xsp.cli doctor
part device_line 130 "$python" tests/gpu/device_line.py "$out/device" --seconds 110
bench bare 120 --device cuda --minutes 1.8 --rounds 3 --of-seconds 2
bench gpu_advice 75 --minutes 1.1 --out "$out/advice" --fixtures "$out/fixtures/advice"
bench gpu_tiles 35 --rounds 10
bench gpu_share 60 --minutes 0.1 --rounds 3
part pytest 80 "$python" -m pytest -m gpu -p no:cacheprovider -rs -v --durations=12 -o faulthandler_timeout=60 $(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# the others run where PARTS names them, or is "all" with more SECONDS
part fixtures 130 "$python" tests/gpu/record.py "$out/fixtures"
bench between 225 --minutes 3.5
bench gpu_drops 45
bench gpu_kineto 60 --rounds 3
bench gpu_attribution 75 --rounds 3
bench gpu_rungs 115 --seconds 3
bench gpu_true_time 75 --rounds 3 --of-seconds 1 --minutes 0.7
bench cupti_decode 30
part counters 90 "$python" -m xsp.cli run --counters --out "$out/fixtures/runs/counters" --overwrite tests/gpu/small.py 40

echo
cat "$out/logs/machine.txt" "$out/summary.txt"
du -sh "$out/fixtures" | cut -f1
exit $failed
