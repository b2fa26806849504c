import torch


class WeightGradStore:
    def __init__(self, delay_wgrad_compute=False):
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self):
        return self.enabled


class TransformerEngineBaseModule(torch.nn.Module):
    """What the linear modules have in common: the attributes that a check looks at."""

    def setup(self, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_size, bias, return_bias, parallel_mode, ub_name,
              delay_wgrad_compute, symmetric_ar_type=None):
        self.in_features, self.out_features, self.tp_size, self.parallel_mode = in_features, out_features, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        self.ub_name, self.symmetric_ar_type, self.fsdp_group = ub_name, symmetric_ar_type, None
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)

    def parameter(self, name, init_method, *shape, params_dtype=None, device=None):
        weight = torch.empty(*shape, dtype=params_dtype, device=device)
        with torch.no_grad():
            init_method(weight)
        setattr(self, name, torch.nn.Parameter(weight))

    def result(self, out):
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return out, bias
        return out if bias is None else out + bias
