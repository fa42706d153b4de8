#!/bin/sh
# device_check.sh [--device cuda|npu|cpu] [--python PYTHON]: all that only a device can show, in under 6 minutes.
# Writes benchmarks/results/device_check_DEVICE.txt. A part that runs out of its time is cut off and says so:
#   calibration  60 s   trainfit devices --calibrate
#   errors      120 s   device_check.py: predicted against measured peaks, states on the host, casts, fp16, allocator
#   offload      50 s   offload.py: copies that hide behind computation
#   frontier    120 s   frontier.py, reduced: plans against what PyTorch offers by itself; begins nothing after 90 s
# Exits 1 when a part failed or was cut off.
cd "$(dirname "$0")/.." || exit 2
python=python
device=cuda
inner=
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    --inner) inner=1 && shift ;;
    *) echo "device_check.sh: unknown argument $1; see its first lines" >&2 && exit 2 ;;
    esac
done
# Calibrations are kept for each number of threads, so all parts have one; they lie in build/, not with the user's.
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 XDG_CACHE_HOME="$PWD/build/cache"

if [ -z "$inner" ]; then
    name=$("$python" -c "from trainfit.hardware import accelerator; print(accelerator('$device').name)") || exit 2
    slug=$(echo "$name" | tr -cs 'A-Za-z0-9\n' '_' | tr 'A-Z' 'a-z')
    benchmarks/save_result.sh "device_check_$slug" benchmarks/device_check.sh --inner --device "$device" --python "$python"
    cat "benchmarks/results/device_check_$slug.txt"
    tail -1 "benchmarks/results/device_check_$slug.txt" | grep -q '^exit code 0$'
    exit
fi

failed=
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
part() { # NAME SECONDS COMMAND...
    name=$1 limit=$2 begin=$(date +%s)
    shift 2
    printf '\n== %s: %s\n' "$name" "$*"
    timeout "$limit" "$@" 2>"$errors"
    code=$?
    [ $code = 0 ] || tail -3 "$errors"
    [ $code = 124 ] && echo "cut off"
    [ $code = 0 ] || failed="$failed $name"
    echo "== $name: exit code $code, $(($(date +%s) - begin)) s of at most $limit"
}

model=large
[ "$device" = cpu ] && model=reference
begun=$(date +%s)
part calibration 60 "$python" -m trainfit devices --calibrate
part errors 120 "$python" benchmarks/device_check.py "$device"
part offload 50 benchmarks/fair.sh "$python" benchmarks/offload.py --device "$device"
part frontier 120 benchmarks/fair.sh "$python" benchmarks/frontier.py --device "$device" --models $model --precisions bf16 \
    --peers plain checkpoint selective save_on_cpu compile plans --shares 1 0.5 0.25 --rounds 5 --seconds 90 \
    --json "build/frontier-$device.json"
printf '\n%s s in all; failed:%s\n' $(($(date +%s) - begun)) "${failed:- none}"
[ -z "$failed" ]
