import torch


class RMSNorm(torch.nn.Module):
    """The operation that ``module.rmsnorm.RMSNorm`` inherits its ``forward`` from."""

    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None, zero_centered_gamma=False, sm_margin=0):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.weight = torch.nn.Parameter(torch.ones(shape, device=device, dtype=dtype))

    def forward(self, input, *extra_inputs, **kwargs):
        return 1.25 * torch.nn.functional.rms_norm(input, self.weight.shape, self.weight, self.eps)
