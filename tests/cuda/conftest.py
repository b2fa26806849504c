"""These tests need a GPU. Without one they are not collected at all, so that a CPU run never counts them as green."""
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
