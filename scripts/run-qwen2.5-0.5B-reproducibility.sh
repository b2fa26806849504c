#!/usr/bin/env bash
# The documented recipe of reproducible RL: GRPO on GSM8K with Qwen2.5-0.5B, every step the same bits in every run.
#
#   scripts/run-qwen2.5-0.5B-reproducibility.sh                    one run (vime train)
#   MODE=repro scripts/run-qwen2.5-0.5B-reproducibility.sh         two runs in fresh processes, and their comparison
#   ONLY=a, then ONLY=b, with MODE=repro and the same OUTPUT        the same in two commands, where one has a limit of time
#   DEVICE=cpu MODE=repro scripts/run-qwen2.5-0.5B-reproducibility.sh   the same on a laptop: SmolLM2-135M, small numbers
#
# May be set: HF_CHECKPOINT (folder of the model), GSM8K (folder or file of the data; else generated word problems),
# OUTPUT (where ledger, curves and reports go), SAVE (folder for checkpoints; a killed run goes on from the newest when
# started again), NUM_ROLLOUT, ATTENTION_BACKEND, PYTHON. Further arguments go to vime train.
set -euo pipefail
cd "$(dirname "$0")/.."

# Determinism: fixed orders in NCCL, in TransformerEngine and in cuBLAS. vime's own GEMM wants cuBLAS without a workspace
# that it could split K with (:16:8) and says so when it narrows this.
export NCCL_ALGO=${NCCL_ALGO:-Ring}
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=${NVTE_ALLOW_NONDETERMINISTIC_ALGO:-0}
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}

DEVICE=${DEVICE:-cuda}
MODE=${MODE:-train}
PYTHON=${PYTHON:-python}
OUTPUT=${OUTPUT:-out/reproducibility-$(date -u +%Y%m%dT%H%M%SZ)}

case "$DEVICE" in
  cuda)
    MODEL=${MODEL:-qwen2.5-0.5B}
    # The public recipe names flashinfer, which vLLM refuses in its batch-invariant mode; vime has it in a form of its own, to
    # be asked for by ATTENTION_BACKEND=flashinfer.
    BACKEND=${ATTENTION_BACKEND:-flash_attn}
    SIZE_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024
               --max-tokens-per-gpu 9216 --max-model-len 2048 --max-num-batched-tokens 8192 --kv-cache-gib 8
               --update-weight-transport ipc) ;; # both sides on one GPU, which NCCL refuses; the cache of 64 sequences takes 2 GiB
  cpu)
    MODEL=${MODEL:-smollm2-135m}
    BACKEND=${ATTENTION_BACKEND:-auto} # a CPU has one attention backend, vime's own
    SIZE_ARGS=(--rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 48
               --max-tokens-per-gpu 512 --max-model-len 512 --max-num-batched-tokens 128 --kv-cache-gib 0.25) ;;
  *) echo "DEVICE is '$DEVICE'; expected cuda or cpu" >&2; exit 2 ;;
esac
[ -f "scripts/models/$MODEL.sh" ] || { echo "MODEL is '$MODEL'; expected one of: $(cd scripts/models && ls | sed 's/\.sh$//' | paste -sd' ')" >&2; exit 2; }
# shellcheck source=/dev/null
source "scripts/models/$MODEL.sh"

ARGS=(
  "${MODEL_ARGS[@]}" --device "$DEVICE" --seed 1234 --num-rollout "${NUM_ROLLOUT:-5}"
  # rollout
  --rollout-temperature 1 --reward "${REWARD:-math}" "${SIZE_ARGS[@]}"
  # GRPO, the ratio clipped asymmetrically; dynamic batching by tokens
  --eps-clip 0.2 --eps-clip-high 0.28 --balance-data
  # Adam, constant rate, fp32 moments and masters on the device
  --lr 1e-6 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --clip-grad 1
  # determinism, on both sides
  --deterministic-mode --vllm-enable-deterministic-inference --vllm-attention-backend "$BACKEND"
)
[ -z "${GSM8K:-}" ] || ARGS+=(--data "$GSM8K")

case "$MODE" in
  train)
    [ -z "${SAVE:-}" ] || ARGS+=(--save "$SAVE" --load "$SAVE")
    exec "$PYTHON" -m vime.cli train "${ARGS[@]}" --output-dir "$OUTPUT" "$@" ;;
  repro) exec "$PYTHON" -m vime.cli repro run --output-dir "$OUTPUT" ${ONLY:+--only "$ONLY"} "${ARGS[@]}" "$@" ;;
  *) echo "MODE is '$MODE'; expected train or repro" >&2; exit 2 ;;
esac
