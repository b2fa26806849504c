import contextlib


class FP8GlobalStateManager:
    enabled = False

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled


@contextlib.contextmanager
def fp8_autocast(enabled=True, **kwargs):
    before, FP8GlobalStateManager.enabled = FP8GlobalStateManager.enabled, enabled
    try:
        yield
    finally:
        FP8GlobalStateManager.enabled = before


@contextlib.contextmanager
def fp8_model_init(enabled=True, **kwargs):
    yield
