"""Megatron's ``torch_dist`` checkpoints, written and read tensor by tensor without building a model.

``torch_dist`` is torch's distributed checkpoint format with two files of Megatron beside it: ``metadata.json`` (which
backend) and ``common.pt`` (what is not sharded). Keys are those of ``GPTModel.sharded_state_dict`` with layers
numbered one by one (``non_homogeneous_layers``, which Megatron is moving to) and the experts of a layer stacked along
a first axis; since shards are found by their global offset, one chunk a tensor loads at any TP, PP and EP. Reading also
knows the older form, in which equal layers are stacked, and the one-shard-one-key form.

``common.pt`` of a foreign checkpoint is never opened, and the pickled index of the format is read by an unpickler that
knows nothing but the classes of that index.
"""
