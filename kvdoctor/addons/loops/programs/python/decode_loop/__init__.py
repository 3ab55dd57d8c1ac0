"""Decodes with an ONNX model whose cache contract is in `contract.json`: token ids in, logits or token ids out.

    decoder = Decoder("path/to/the/model", "path/to/contract.json")
    tokens = decoder.generate([[5, 6, 7]], most=20)

A process may have any number of decoders, of one model or of several.
"""

from .contract import Contract, ContractError, read_contract
from .decoder import Decoder
from .sampling import Choose, Sampling

__all__ = ["Choose", "Contract", "ContractError", "Decoder", "Sampling", "read_contract"]
