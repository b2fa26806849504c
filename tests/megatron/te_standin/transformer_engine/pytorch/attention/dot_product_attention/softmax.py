import torch


class FusedScaleMaskSoftmax(torch.nn.Module):
    pass
