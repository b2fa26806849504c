import torch

from ..cpp_extensions import general_gemm
from .base import TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
                 get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None,
                 parallel_mode=None, parameters_split=None, device="cuda", ub_name=None, delay_wgrad_compute=False,
                 symmetric_ar_type=None):
        super().__init__()
        self.setup(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_size, bias, return_bias, parallel_mode, ub_name,
                   delay_wgrad_compute, symmetric_ar_type)
        self.weight_names = ["weight"]
        self.parameter("weight", init_method, out_features, in_features, params_dtype=params_dtype, device=device)
        if bias:
            self.parameter("bias", torch.nn.init.zeros_, out_features, params_dtype=params_dtype, device=device)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self.result(general_gemm(self.weight, inp))
