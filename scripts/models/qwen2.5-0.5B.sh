# Qwen2.5-0.5B: 24 layers, hidden 896, 14 heads, 2 KV heads, tied embeddings. Sourced by the run script.
#
# HF_CHECKPOINT is its Hugging Face folder. Without one, random weights of its shape stand in: nothing is learned from
# them, but every kernel, order and rounding is the same, and only that is what reproducibility asks about.
# The layers, widths and dtypes come from the folder's config.json; nothing is repeated here.
if [ -z "${HF_CHECKPOINT:-}" ]; then
  HF_CHECKPOINT=$("${PYTHON:-python}" -c "from gates.profiles import find; print(find('qwen2.5-0.5b').checkpoint())")
  REWARD=${REWARD:-gate} # random weights answer nothing right, and a group of equal rewards has no gradient
fi
MODEL_ARGS=(--hf-checkpoint "$HF_CHECKPOINT" --dtype bfloat16)
