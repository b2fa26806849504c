class CudaRNGStatesTracker:
    pass


def activation_recompute_forward(*args, **kwargs):
    raise NotImplementedError("stand-in")
