#!/usr/bin/env bash
# Makes virtual environments with the packages that adapters stand on, one each, for `make test-adapters`: their
# dependencies contradict each other. Says nothing when all are there.
#
#   tools/adapters_env.sh [DIRECTORY] [NAME ...]     default .venv-adapters, all; some minutes and 1.5 GB, once
#
# PYTHON chooses the interpreter (3.11 or later). One that cannot be made is named, and fails the script at its end.
set -uo pipefail
cd "$(dirname "$0")/.."

DIRECTORY="${1:-.venv-adapters}"
PYTHON="${PYTHON:-python3.11}"
command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
declare -A PACKAGES=(
    [verifiers]="verifiers==0.4.0"
    [reasoning-gym]="reasoning-gym==0.1.25 textarena==0.7.4"
    [openenv]="openenv==0.10.0"
)
# What a worker needs beside its environment's own packages.
WORKER="msgspec numpy pydantic"
failed=0

for name in "${@:2}" ; do
    [ -n "${PACKAGES[$name]:-}" ] || { echo "adapters_env: no adapter $name: ${!PACKAGES[*]}" >&2; exit 2; }
done
chosen=("${@:2}")
[ ${#chosen[@]} -gt 0 ] || chosen=(verifiers reasoning-gym openenv)
for name in "${chosen[@]}"; do
    venv="$DIRECTORY/$name"
    wanted="${PACKAGES[$name]} $WORKER"
    [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ] && continue
    echo "adapters_env: making $venv with ${PACKAGES[$name]}"
    log="$(mktemp)"
    # shellcheck disable=SC2086
    if { [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"; } >"$log" 2>&1 \
        && "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -q $wanted >>"$log" 2>&1; then
        echo "$wanted" >"$venv/.ready"
    else
        cat "$log" >&2
        echo "adapters_env: $name could not be made" >&2
        failed=1
    fi
    rm -f "$log"
done
exit $failed
