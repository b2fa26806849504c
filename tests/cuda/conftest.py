"""These tests need a GPU. Without one they are not collected at all, so that a CPU run never counts them as green."""
import os

import torch

os.environ["VIME_PROOFS"] = "off"  # a test proves for itself; what is kept on disk is tested in test_kept_proofs.py
if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    import vime.ops.cuda  # noqa: F401  before any test touches the device: cuBLAS reads its workspace setting once
