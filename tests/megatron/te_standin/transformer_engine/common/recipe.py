class DelayedScaling:
    def __init__(self, **kwargs):
        raise NotImplementedError("stand-in")
