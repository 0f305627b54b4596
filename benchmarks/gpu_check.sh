#!/usr/bin/env bash
# Checks and times a plan on this machine's GPU, one of several ranks on as many: benchmarks/gpu_check.sh PLAN [OUT.jsonl];
# at most five minutes.
set -euo pipefail
plan=$(realpath "${1:?usage: benchmarks/gpu_check.sh PLAN [OUT.jsonl]}")
out=$(realpath -m "${2:-gpu_check.jsonl}")
cd "$(dirname "$0")/.."
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
timeout 300 "${PYTHON:-python3}" -m benchmarks.gpu_check "$plan" | tee "$out"
