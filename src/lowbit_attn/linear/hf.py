"""transformers loads models of codebook weights once this module is imported.

    import lowbit_attn.linear.hf
    model = AutoModelForCausalLM.from_pretrained(folder)    # as lowbit-attn quantize wrote it
"""

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit_attn.linear.checkpoint import METHOD
from lowbit_attn.linear.formats import VERSION, format_named
from lowbit_attn.linear.module import VersionError, VQLinear


@register_quantization_config(METHOD)
class CodebookConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of such a model: format, layout version, names of the quantized modules."""

    def __init__(self, format: str, version: int, modules: list[str], **_):
        format_named(format)
        if version != VERSION:
            raise VersionError(f"weights: got layout version {version}, supported: {VERSION}; quantize the model again")
        self.quant_method, self.format, self.version, self.modules = METHOD, format, version, modules


@register_quantizer(METHOD)
class CodebookQuantizer(HfQuantizer):
    """Puts a VQLinear in the place of each quantized layer before transformers loads the weights."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        for name in config.modules:
            old = model.get_submodule(name)
            if not isinstance(old, nn.Linear):
                raise ValueError(f"modules: got {name}, a {type(old).__name__}, supported: linear layers")
            made = VQLinear(old.in_features, old.out_features, config.format, bias=old.bias is not None,
                            device="meta", dtype=old.weight.dtype)
            model.set_submodule(name, made)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for module in model.modules():
            if isinstance(module, VQLinear):
                module.header_is_due = module.header.is_meta  # where its buffers are offloaded until each call
                if not module.header_is_due:
                    module.check_header()
        return model

    def _dequantize(self, model, dtype=None):
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a configuration that was saved has a name
        for name in self.quantization_config.modules:
            old = model.get_submodule(name)
            if old.header.is_meta or hasattr(old, "_hf_hook"):
                raise ValueError(f"model: {name} is placed by a device_map over several devices or offloaded, "
                                 "supported by dequantize: a model that was loaded onto one device")
            new = nn.Linear(old.in_features, old.out_features, old.bias is not None, device=old.header.device,
                            dtype=dtype)
            with torch.no_grad():
                new.weight.copy_(old.vq_weight.dequantize())
                if old.bias is not None:
                    new.bias.copy_(old.bias)
            model.set_submodule(name, new)
        return model

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return True
