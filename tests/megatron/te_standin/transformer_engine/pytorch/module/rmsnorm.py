from ..ops import RMSNorm as _Operation


class RMSNorm(_Operation):
    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
                 hidden_size=None, **kwargs):
        super().__init__(normalized_shape, eps=eps, zero_centered_gamma=zero_centered_gamma, dtype=params_dtype, **kwargs)
        self.sequence_parallel = sequence_parallel
