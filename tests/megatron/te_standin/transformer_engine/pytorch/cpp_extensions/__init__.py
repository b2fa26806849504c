from .gemm import general_gemm

__all__ = ["general_gemm"]
