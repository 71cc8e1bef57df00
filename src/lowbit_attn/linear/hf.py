"""transformers loads models of codebook weights once this module is imported.

    import lowbit_attn.linear.hf
    model = AutoModelForCausalLM.from_pretrained(folder)    # as lowbit-attn quantize wrote it
"""

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit_attn.errors import WeightFileError
from lowbit_attn.linear.checkpoint import METHOD
from lowbit_attn.linear.module import VQLinear
from lowbit_attn.linear.sealed import check_entries, check_files, check_planes, sealed


@register_quantization_config(METHOD)
class CodebookConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of such a model: format, layout version, the quantized modules, and hashes, as
    ``sealed.py`` has them. VersionError or WeightFileError for entries that were changed."""

    def __init__(self, format: str | None = None, version: int | None = None, modules=None, rest: str | None = None,
                 hash: str | None = None, **_):
        check_entries(format, version, modules, rest, hash)
        self.quant_method, self.format, self.version, self.modules = METHOD, format, version, modules
        self._rest = rest  # of these files; others that transformers writes may have other dtypes

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of each module's planes, by name; empty of a model that was written without."""
        return self.modules if isinstance(self.modules, dict) else {}

    def to_dict(self) -> dict:
        """The entries of a folder that transformers writes."""
        entries = {"format": self.format, "version": self.version, "modules": self.modules}
        return {"quant_method": METHOD} | (sealed(**entries, rest=None) if self.hashes else entries)


@register_quantizer(METHOD)
class CodebookQuantizer(HfQuantizer):
    """Puts a VQLinear in the place of each quantized layer before transformers loads the weights.

    The files are checked first, and what was loaded afterwards: WeightFileError or VersionError.
    """

    requires_calibration = True
    _are_checked = False  # the hashes of all modules, in the files

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        config, layers = self.quantization_config, {}
        for name in config.modules:
            try:
                old = model.get_submodule(name)
            except AttributeError:
                raise WeightFileError(f"modules: got {name}, which {type(model).__name__} does not have, supported: "
                                      "its linear layers") from None
            if not isinstance(old, nn.Linear):
                raise WeightFileError(f"modules: got {name}, a {type(old).__name__}, supported: linear layers")
            layers[name] = VQLinear(old.in_features, old.out_features, config.format, bias=old.bias is not None,
                                    device="meta", dtype=old.weight.dtype)
            model.set_submodule(name, layers[name])
        if checkpoint_files:
            self._are_checked = check_files(checkpoint_files, layers, config.hashes, config._rest)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name in self.quantization_config.modules:
            module = model.get_submodule(name)
            if not isinstance(module, VQLinear):
                continue  # dequantized
            module.header_is_due = module.header.is_meta  # where its buffers are offloaded until each call
            if module.header_is_due:
                continue
            module.check_header()
            if not self._are_checked:
                planes = {plane: getattr(module, plane) for plane in (*module.plane_names, "header")}
                check_planes(name, planes, self.quantization_config.hashes.get(name))
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
