#!/usr/bin/env bash
# A run on a real vLLM that is started for it and ended with it: tools/vllm_run.sh VENV CONFIG [options of paceline run]
set -euo pipefail
VENV="$1" CONFIG="$2" PORT="${PORT:-8000}"
shift 2

LOG="$(mktemp)"
"$VENV-vllm/bin/python" tools/vllm_serve.py src/paceline/assets/small_policy --port "$PORT" >"$LOG" 2>&1 &
SERVER=$!
trap 'kill $SERVER 2>/dev/null || true; wait $SERVER 2>/dev/null || true; rm -f "$LOG"' EXIT
echo "starting vLLM at port $PORT: a minute or so"
until grep -q "Application startup complete" "$LOG"; do
    kill -0 $SERVER 2>/dev/null || { tail -n 20 "$LOG"; echo "vLLM ended before it was up"; exit 1; }
    sleep 1
done
"$VENV/bin/paceline" run "$CONFIG" --engine.urls "[\"http://127.0.0.1:$PORT\"]" "$@"
