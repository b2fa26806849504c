import torch

from ..cpp_extensions import general_gemm
from .base import TransformerEngineBaseModule


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
                 tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm", return_bias=False,
                 params_dtype=None, parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False,
                 parameters_split=None, zero_centered_gamma=False, device="cuda", ub_name=None, delay_wgrad_compute=False,
                 symmetric_ar_type=None):
        super().__init__()
        self.setup(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_size, bias, return_bias, parallel_mode, ub_name,
                   delay_wgrad_compute, symmetric_ar_type)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output, self.weight_names = return_layernorm_output, ["weight"]
        options = {"params_dtype": params_dtype, "device": device}
        self.parameter("layer_norm_weight", torch.nn.init.ones_, in_features, **options)
        self.parameter("weight", init_method, out_features, in_features, **options)
        if bias:
            self.parameter("bias", torch.nn.init.zeros_, out_features, **options)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)

    def forward(self, inp, is_first_microbatch=None, fp8_grad=False):
        x = torch.nn.functional.rms_norm(inp, (self.in_features,), self.layer_norm_weight, self.eps)
        return self.result(general_gemm(self.weight, x))
