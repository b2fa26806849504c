import torch

from .softmax import FusedScaleMaskSoftmax


class _Backend(torch.nn.Module):
    def __init__(self, softmax_scale):
        super().__init__()
        self.softmax_scale = softmax_scale


class FlashAttention(_Backend):
    pass


class FusedAttention(_Backend):
    pass


class UnfusedDotProductAttention(_Backend):
    def __init__(self, softmax_scale, attention_dropout):
        super().__init__(softmax_scale)
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = torch.nn.Dropout(attention_dropout)
