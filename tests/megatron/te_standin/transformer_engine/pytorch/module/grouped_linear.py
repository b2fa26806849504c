import torch

from ..cpp_extensions import general_gemm
from .base import TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(self, num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
                 tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
                 params_dtype=None, parallel_mode=None, device="cuda", ub_name=None, delay_wgrad_compute=False):
        super().__init__()
        self.setup(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_size, bias, return_bias, parallel_mode, ub_name,
                   delay_wgrad_compute)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self.parameter(f"weight{i}", init_method, out_features, in_features, params_dtype=params_dtype, device=device)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        return torch.cat([general_gemm(getattr(self, f"weight{i}"), x) for i, x in enumerate(inp.split(m_splits))])
