"""Kernels that come in somebody's wheel. Imported when used; kernels only, never another framework's modules."""
