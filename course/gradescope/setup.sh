#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image: Ubuntu, as root.
set -euo pipefail
root=${AUTOGRADER:-/autograder} # another folder to try it elsewhere
if [ -z "${AUTOGRADER:-}" ]; then
    apt-get -qq update
    apt-get -qq install -y python3 python3-venv
fi
for python in python3 python3.14 python3.13 python3.12 python3.11 none; do
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2> /dev/null && break
done
if [ "$python" = none ]; then # Ubuntu 22.04 has Python 3.10, for which there is no transformers
    echo "error: Python 3.11 or newer is needed: choose an image with Ubuntu 24.04 or newer" >&2
    exit 1
fi
"$python" -m venv "$root/venv"
pip() { "$root/venv/bin/python" -m pip install -q --no-cache-dir "$@"; }
# The build of torch for CPUs is a tenth of the other; TORCH_INDEX= takes pip's own index.
index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
pip ${index:+--index-url "$index"} "$(grep '^torch' "$root/source/grader/requirements.txt")"
pip -r "$root/source/grader/requirements.txt" pytest "peft>=0.18" # tests of reference take an adapter
