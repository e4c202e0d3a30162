"""Quantize and dequantize safetensors checkpoints, tensor by tensor.

* ``recipes``: how one weight becomes tensors of a quantized checkpoint, and back.
* ``files``: shards and their index, a streaming writer, atomic and resumable output.
* ``convert``: the two conversions.
"""
