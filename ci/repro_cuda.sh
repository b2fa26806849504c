#!/usr/bin/env bash
# The documented recipe twice on one GPU, compared, and its evidence: ci/repro_cuda.sh FOLDER [quick|full|full-a|full-b]
#
# quick: two steps of 8 prompts x 8 samples, responses up to 128; both runs and the evidence in one command.
# full: five steps as documented (32 x 8, responses up to 1024), both runs at the same time on the GPU.
# full-a, then full-b with the same FOLDER: the same, one run a command, for machines where a command has a limit of time.
# FOLDER/evidence.json is written when both runs are there.
#
# MODEL (qwen2.5-0.5B with random weights, or smollm2-135m with HF_CHECKPOINT), ATTENTION_BACKEND (flash_attn, flashinfer) and
# PYTHON may be set. The exit code is that of the verdict.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,11p' "$0" >&2; exit 2; }
folder=$1 form=${2:-quick}
export MODE=repro DEVICE=cuda MODEL=${MODEL:-qwen2.5-0.5B} OUTPUT="$folder/runs" PYTHON=${PYTHON:-python}
code=0
case "$form" in
  quick) NUM_ROLLOUT=2 scripts/run-qwen2.5-0.5B-reproducibility.sh --rollout-batch-size 8 --rollout-max-response-len 128 || code=$? ;;
  full) scripts/run-qwen2.5-0.5B-reproducibility.sh --at-once || code=$? ;;
  full-a) ONLY=a exec scripts/run-qwen2.5-0.5B-reproducibility.sh ;;
  full-b) ONLY=b scripts/run-qwen2.5-0.5B-reproducibility.sh || code=$? ;;
  *) echo "the form is '$form'; expected quick, full, full-a or full-b" >&2; exit 2 ;;
esac
name=$MODEL
[ "$MODEL" != qwen2.5-0.5B ] || [ -n "${HF_CHECKPOINT:-}" ] || name="$MODEL, random weights"
[ ! -f "$OUTPUT/report.json" ] || "$PYTHON" ci/repro_evidence.py "$OUTPUT" --model "$name, ${ATTENTION_BACKEND:-flash_attn}" --out "$folder/evidence.json" || code=$?
exit "$code"
