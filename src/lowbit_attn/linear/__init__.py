"""Linear layers over codebook weights of 2 to 4 bits: the weight half of VQ-LLM, separate from the attention API.

    w = lowbit_attn.linear.quantize(weight, "e8p4", hessian)    # or from_aqlm, from_quip_sharp: published checkpoints
    y = lowbit_attn.linear.linear(x, w)                         # x W^T
    layer = lowbit_attn.linear.VQLinear.from_weight(w, bias)    # an nn.Module

``lowbit-attn quantize`` does a whole model. On Hopper, SM80 and SM89 few rows of x meet kernels that read packed codes,
many rows W in chunks of 16 bits (lowbit_attn/linear_kernels.py); elsewhere all runs through torch.
"""

from lowbit_attn.errors import VersionError, WeightFileError
from lowbit_attn.linear.formats import NAMES, format_named
from lowbit_attn.linear.ldlq import proxy_error
from lowbit_attn.linear.module import VQLinear
from lowbit_attn.linear.published import from_aqlm, from_quip_sharp
from lowbit_attn.linear.quantizer import quantize, quantize_together
from lowbit_attn.linear.weight import VQWeight, linear

__all__ = ["NAMES", "VQLinear", "VQWeight", "VersionError", "WeightFileError", "format_named", "from_aqlm",
           "from_quip_sharp", "linear", "proxy_error", "quantize", "quantize_together"]
