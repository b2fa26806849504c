class QuantizedTensor:
    pass
