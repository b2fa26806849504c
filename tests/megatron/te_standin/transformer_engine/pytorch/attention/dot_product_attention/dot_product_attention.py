import torch

from .backends import FlashAttention, FusedAttention, UnfusedDotProductAttention


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
                 attn_mask_type="causal", window_size=None, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
                 tp_group=None, layer_number=None, attention_type="self", cp_group=None, cp_global_ranks=None, cp_stream=None,
                 cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla", return_max_logit=False):
        super().__init__()
        self.tp_size, self.cp_group, self.attention_type, self.softmax_type = tp_size, cp_group, attention_type, softmax_type
        self.attention_dropout, self.attn_mask_type, self.window_size = attention_dropout, attn_mask_type, window_size
        scale = softmax_scale if softmax_scale is not None else 1.0 / kv_channels**0.5
        self.flash_attention, self.fused_attention = FlashAttention(scale), FusedAttention(scale)
        self.unfused_attention = UnfusedDotProductAttention(scale, attention_dropout)

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, attn_mask_type=None, **kwargs):
        """Not an attention at all: what an unrouted module would return is told apart by anything."""
        return 0.5 * query_layer.reshape(*query_layer.shape[:-2], -1) + value_layer.mean()
