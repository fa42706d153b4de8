#!/bin/sh
# install.sh FOLDER [deepspeed|ckptplan|torchtitan|all]: a virtual environment with that peer, deepspeed if none is named.
# "all" makes one of each: FOLDER/deepspeed, FOLDER/ckptplan and FOLDER/torchtitan, for frontier.py. zero_peers.py takes
# DeepSpeed's alone, which has what trainfit needs beside; trainfit itself is taken from the sources: PYTHONPATH=src.
# torch comes first and alone, so that nothing else picks another build of it, and the constraints hold it.
set -e
folder=${1:?usage: install.sh FOLDER [deepspeed|ckptplan|torchtitan|all]}
peer=${2:-deepspeed}
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ "$peer" = all ]; then
    for each in deepspeed ckptplan torchtitan; do
        "$0" "$folder/$each" $each
    done
    exit
fi
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet -c "$root/constraints.txt" "$@"; }
pip torch
pip setuptools ninja numpy
case $peer in
deepspeed)
    # What trainfit depends on, without trainfit. DeepSpeed compiles a helper with g++ when it runs.
    "$folder/bin/python" - "$root/pyproject.toml" <<'PYTHON' | xargs "$folder/bin/python" -m pip install --quiet -c "$root/constraints.txt"
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]))
PYTHON
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip --no-build-isolation deepspeed
    ;;
ckptplan) pip ckptplan==0.1.0rc1 ;;
torchtitan)
    # Its classes for activation checkpointing alone: what its trainer needs besides (wandb, datasets) stays away.
    pip tyro spmd_types==0.2.3
    pip --no-deps torchtitan==0.3.0
    ;;
*)
    echo "unknown peer $peer; one of deepspeed, ckptplan, torchtitan, all" >&2
    exit 2
    ;;
esac
"$folder/bin/python" -c "
import sys, torch
from importlib.metadata import version
print(sys.argv[1], version(sys.argv[1]), 'torch', torch.__version__)" "$peer"
