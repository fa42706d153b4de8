#!/bin/sh
# install.sh FOLDER: makes a virtual environment there with DeepSpeed beside what trainfit needs, for zero_peers.py.
# torch comes first and alone, so that nothing else picks another build of it. DeepSpeed compiles a helper with g++
# when it runs. trainfit itself is taken from the sources: PYTHONPATH=src.
set -e
folder=${1:?usage: install.sh FOLDER}
root=$(cd "$(dirname "$0")/../.." && pwd)
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet -c "$root/constraints.txt" "$@"; }
pip torch
pip setuptools ninja numpy
# What trainfit depends on, without trainfit.
"$folder/bin/python" - "$root/pyproject.toml" <<'PYTHON' | xargs "$folder/bin/python" -m pip install --quiet -c "$root/constraints.txt"
import sys, tomllib
print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]))
PYTHON
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip --no-build-isolation deepspeed
"$folder/bin/python" -c "import deepspeed, torch; print('deepspeed', deepspeed.__version__, 'torch', torch.__version__)" 2>/dev/null
