"""Slot-order dispatch: tokens to their experts and every (token, slot) row back to its token's owner, one by one.

Megatron's dispatchers add the rows of a token on the way (per rank, then across ranks), so the order of the sum depends on
which experts share a rank. Here nothing is added on the way; the owner adds, in the order of the router's slots.

* :mod:`.transport`: moving rows between ranks, over a torch process group
* :mod:`.deepep`: the same over DeepEP's ``Buffer`` (not proven: it has run against a stand-in only)
* :mod:`.routes`: what travels with a (token, slot) row, and how it is checked on arrival
* :mod:`.dispatcher`: all of it behind Megatron's dispatcher interface
"""
