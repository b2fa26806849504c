"""The engine side: vLLM with vime's operations, in a process of its own, driven over HTTP.

``plugin`` routes vLLM's layers to :mod:`vime.ops`; ``server`` and ``engine`` are the process; ``client`` and ``launch``
are what a controller uses and import neither vLLM nor torch.
"""
