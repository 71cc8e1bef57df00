"""vLLM's interfaces over a ``PagedStore``: the one file that follows vLLM's own names.

Pages: a block of vLLM is a whole number of 128-token pages; it hands them over as [pages, heads, 128, C] of bytes, each
(page, head) one record. Rings: a pseudo layer beside each attention layer asks for one block a request
(``CircularBufferSpec``), which vLLM's own manager allocates, frees and preempts. ``forward`` stores new tokens before
it attends, so that no setting of vLLM's compiler can put the two in another order.

On a GPU every step goes through ``LayerSteps``: its plan is made once for all layers, nothing is read by the host, and
what steps read stays in place, so that vLLM captures steps without prompts in CUDA graphs. On a CPU the host looks at
each step.

With decode context parallelism vLLM deals blocks to ranks, in turn by --cp-kv-cache-interleave-size tokens. Pages of a
block table are then this rank's; rings are not dealt: every rank has all of a request's newest tokens (paged_ranks.py).

A draft model runs inside a step, over the same rows, with metadata of its attention layers alone. So its rings are made
with those of the target model, and each ring keeps the table that the step gave it.
"""

import logging
import os
from dataclasses import dataclass, replace

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_dcp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from lowbit_attn import paged, paged_ranks
from lowbit_attn.cache.attached import Attached
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.integrations.vllm import books, gpu, names
from lowbit_attn.integrations.vllm.plans import Planner
from lowbit_attn.paged import NULL, PAGE, PagedStore, Step
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_plan import BatchPlan, PlanBuffers, TokenLayout
from lowbit_attn.paged_steps import LayerSteps, workspace_tokens
from lowbit_attn.reference import Attention

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own logger
RING = "lowbit_ring.layers."  # names of the rings' pseudo layers: one number, as vLLM wants
DRAFT_RING = "lowbit_draft_ring.layers."


def layout() -> str:
    """How vLLM lays out the pool: what its variable says, else blocks outermost, where rings have a size of their
    own."""
    return os.environ.get("VLLM_KV_CACHE_LAYOUT") or names.LAYOUTS[0]


def ring_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of tokens in 16 bit, for a model's."""
    return torch.float16 if dtype == torch.float32 else dtype


def engine_of(config: VllmConfig) -> names.Engine:
    """What of vLLM's configuration matters here."""
    parallel, drafts, cache = config.parallel_config, config.speculative_config, config.cache_config
    return names.Engine(
        device=current_platform.device_type, arch=gpu.arch(), dtype=ring_dtype(config.model_config.dtype),
        block_size=cache.block_size or PAGE, layout=layout(),
        prefix_caching=bool(cache.enable_prefix_caching),
        hybrid=not config.scheduler_config.disable_hybrid_kv_cache_manager,
        dcp=parallel.decode_context_parallel_size, interleave=parallel.cp_kv_cache_interleave_size,
        pcp=parallel.prefill_context_parallel_size,
        tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size,
        connector=config.kv_transfer_config.kv_connector if config.kv_transfer_config else None,
        drafts=drafts.method if drafts else None, num_drafts=drafts.num_speculative_tokens if drafts else 0,
        skips_layers=bool(cache.kv_cache_dtype_skip_layers), unsafe=gpu.unsafe_settings(config))


def largest_step(config: VllmConfig) -> tuple[int, int]:
    """The most rows and new tokens of a step: with the padded rows of a captured graph, and the token more that a
    draft model's rows have."""
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    rows = max(config.scheduler_config.max_num_seqs, *sizes, 1)
    return rows, max(config.scheduler_config.max_num_batched_tokens, *sizes, 1) + rows


def dealt(engine: names.Engine) -> tuple[int, int]:
    """This rank's number among those that share a sequence's blocks, and how many they are."""
    return (get_dcp_group().rank_in_group, engine.dcp) if engine.dcp > 1 else (0, 1)


def of_all_ranks(x: torch.Tensor) -> torch.Tensor:
    """x, of one shape on all ranks that share a sequence's blocks -> [ranks, *x.shape]."""
    return get_dcp_group().all_gather(x.contiguous()[None], dim=0)


def served_by(config: VllmConfig) -> names.Served:
    """What a process serves, kept for calls that get no configuration. ValueError for a second dtype in a process."""
    served = names.asked(config.cache_config.cache_dtype, os.environ.get(names.VARIABLE))
    if LowBitBackend.served not in (None, served):
        raise ValueError(f"--kv-cache-dtype: got {served} after {LowBitBackend.served}, supported: one in a process")
    LowBitBackend.served = served
    return served


def codebooks_of(config: VllmConfig, served: names.Served) -> Codebooks | None:
    """The model's codebooks, found once for all of its layers; None for formats without.

    Bytes of pages must mean the same on all ranks, which share one prefix cache: ValueError if they do not.
    """
    model, place = config.model_config, os.environ.get(names.BOOKS)
    if LowBitBackend.found_for == (model.model, place):
        return LowBitBackend.codebooks
    found = None
    if served.format.needs_codebooks:
        found = books.find(place, model.model, model.hf_text_config, served.format)
    identity, group = books.identity(served.format, found), get_tp_group()
    theirs = [identity] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(theirs, identity, group.cpu_group)
    if len(set(theirs)) > 1:
        raise ValueError(f"lowbit_attn: the ranks' pages are of {', '.join(theirs)}, supported: one version of "
                         "lowbit_attn and one codebook file on all ranks")
    LowBitBackend.codebooks, LowBitBackend.found_for = found, (model.model, place)
    logger.info("lowbit_attn serves %s, pages of identity %s", served.format, identity)
    return found


@dataclass
class LowBitMetadata(AttentionMetadata):
    """What a layer, or its ring, gets of a step."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    plan: BatchPlan | None = None  # on a GPU; None: the host looks at the step


class LowBitBuilder(AttentionMetadataBuilder[LowBitMetadata]):
    """Metadata of attention layers, without a look at a device value by the host."""

    is_planned = current_platform.is_cuda()
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH if is_planned else AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.engine = engine_of(vllm_config)
        self.max_rows, self.max_tokens = largest_step(vllm_config)
        self.reorder_batch_threshold = self.engine.max_q_len if self.is_planned else None
        self.planner: Planner | None = None  # made at a first step, when the layers have their memory

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> LowBitMetadata:
        common = common_attn_metadata
        metadata = LowBitMetadata(common.block_table_tensor, common.seq_lens, common.query_start_loc)
        if self.is_planned:
            if self.planner is None:
                self.planner = self._planner()
            step = Step(metadata.table, metadata.seq_lens, metadata.query_start_loc, None)
            metadata.plan = self.planner.plan(step, common)
        return metadata

    def _planner(self) -> Planner:
        impl = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].impl
        slots = impl.ring.rings().shape[3] - impl.served.sinks
        where = TokenLayout.of(impl.served.format, impl.served.sinks, slots, self.engine.block_size // PAGE,
                               *dealt(self.engine))
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        return Planner(where, self.max_rows, self.max_tokens, self.engine.max_q_len, sizes, self.device,
                       gpu.copy_to(self.device), impl.ring.name_of == DRAFT_RING)


class LowBitBackend(AttentionBackend):
    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16, *[torch.float32] * current_platform.is_cpu()]
    served: names.Served | None = None  # in this process, once a layer was made
    codebooks: Codebooks | None = None
    found_for: tuple[str, str | None] | None = None  # the model that has them, and the place that it was told
    supported_kv_cache_dtypes = []  # any: what is not served is told by LowBitImpl, with what to change

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return LowBitImpl

    @staticmethod
    def get_builder_cls():
        return LowBitBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [PAGE]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout[layout()],)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps are even by what the host knows

    @classmethod
    def customize_spec(cls, spec):
        if not isinstance(spec, FullAttentionSpec):
            raise NotImplementedError(f"lowbit_attn: got {type(spec).__name__}, supported: full attention")
        record = LowBitBackend.served.format.record(spec.head_size)
        return replace(spec, dtype=torch.uint8, state_content_bytes=record.nbytes // PAGE)


class RingBuilder(LowBitBuilder):
    is_planned = False  # rings have no step of their own

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self.rings = [context[name] for name in layer_names]
        with torch.inference_mode(False):  # written in either mode
            self.rows = torch.zeros(self.max_rows, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> LowBitMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        first = metadata.table[:, 0]
        if len(first) > len(self.rows):
            self.rows = self.rows.new_zeros(len(first))
        torch.clamp(first, min=NULL, out=self.rows[: len(first)])
        for ring in self.rings:
            ring.rows = self.rows
        return metadata


class RingBackend(LowBitBackend):
    @staticmethod
    def get_name() -> str:
        return "LOWBIT_RING"

    @staticmethod
    def get_builder_cls():
        return RingBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec):
        return spec


class Ring(nn.Module, AttentionLayerBase):
    """The 16-bit tokens of every request in one layer, a block each."""

    def __init__(self, name_of: str, index: int, served: names.Served, layer: names.Layer, dtype: torch.dtype):
        super().__init__()
        self.name_of, self.index, self.served, self.layer = name_of, index, served, layer
        self.dtype = ring_dtype(dtype)
        self.kv_cache = torch.tensor([])
        self.nbytes = 0  # of a request
        self.rows: torch.Tensor | None = None  # int32: each request's block, of the last step
        self.is_taken = False

    def get_attn_backend(self):
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CircularBufferSpec:
        tokens = engine_of(vllm_config).block_size
        return CircularBufferSpec(block_size=tokens, num_kv_heads=1, head_size=1, head_size_v=0, dtype=torch.uint8,
                                  state_content_bytes=self.nbytes // tokens, dcp_sharded=False)

    def rings(self) -> torch.Tensor:
        """[blocks, 2, heads, tokens, head_dim]."""
        raw, (heads, head_dim) = self.kv_cache.flatten(1), (self.layer.num_heads_kv, self.layer.head_dim)
        tokens = names.ring_tokens(self.served, raw.shape[1], self.layer)
        return raw[:, : 4 * heads * tokens * head_dim].view(self.dtype).unflatten(1, (2, heads, tokens, head_dim))


def layers_in(config: VllmConfig) -> int:
    """Layers of ours so far, those of a draft model behind the others."""
    layers = config.compilation_config.static_forward_context.values()
    return sum(isinstance(getattr(layer, "impl", None), LowBitImpl) for layer in layers)


def rings_of_layer(config: VllmConfig, served: names.Served, layer: names.Layer) -> list[Ring]:
    """The ring of the layer that is being made, and with the first one those of a draft model.

    All have one size, so that vLLM groups them as it likes.
    """
    context, model, drafts = (config.compilation_config.static_forward_context, config.model_config,
                              config.speculative_config)
    if model.runner_type == "draft":
        free = (x for x in context.values() if isinstance(x, Ring) and x.name_of == DRAFT_RING and not x.is_taken)
        ring = next(free, None)
        if ring is None or ring.layer != layer:
            raise NotImplementedError(f"lowbit_attn: a layer of the draft model is {layer}, expected: "
                                      f"{ring and ring.layer}; supported: models whose layers are alike")
        return [ring]
    index, engine = layers_in(config), engine_of(config)
    rings = [Ring(RING, index, served, layer, model.dtype)]
    if drafts and drafts.method == names.DRAFT_MODEL:
        model, parallel = drafts.draft_model_config, drafts.draft_parallel_config
        layer = names.Layer(model.get_head_size(), model.get_num_kv_heads(parallel))
        rings += [Ring(DRAFT_RING, i, served, layer, model.dtype) for i in range(model.get_num_layers(parallel))]
    nbytes = max(names.ring_bytes(served, engine, ring.layer) for ring in rings)
    for ring in rings:
        ring.nbytes = nbytes
    return rings if not index else rings[:1]


class LowBitImpl(AttentionImpl):
    """Attention of one layer. Raises NotImplementedError, saying what to change, for what cannot be served."""

    supports_dcp = can_return_lse_for_decode = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes=None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sink_logits = kv_cache_dtype, sinks
        self.softcap = logits_soft_cap or None
        config = get_current_vllm_config()
        self.served, self.engine = served_by(config), engine_of(config)
        names.check_dtype(kv_cache_dtype, config.cache_config.cache_dtype)
        self.layer = names.Layer(head_size, self.num_kv_heads, sliding_window, alibi_slopes is not None,
                                 AttentionType(attn_type).value, kv_sharing_target_layer_name is not None, num_heads)
        reasons = names.why_not(self.served, self.engine, self.layer)
        if reasons:
            raise NotImplementedError(f"lowbit_attn cannot serve this model: {'; '.join(reasons)}")
        codebooks = codebooks_of(config, self.served)
        rings = rings_of_layer(config, self.served, self.layer)
        self.ring, self.ring.is_taken = rings[0], True
        self.entering = config.compilation_config.static_forward_context, rings
        self.workspace_tokens = workspace_tokens(largest_step(config)[1])
        self.attached = None if codebooks is None else self._attached(codebooks)
        self.store: PagedStore | None = None
        self.memory: list = []  # of the store
        self.steps: dict[int, LayerSteps] = {}  # by the buffers of their plans: a model's and a draft model's

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Enter the rings among the layers: behind those of the model, whose group of blocks vLLM then has first and
        gives to drafts; before those of a draft model, all of which vLLM takes to be of one group."""
        context, rings = self.entering
        context.update({f"{ring.name_of}{ring.index}": ring for ring in rings})

    def _attached(self, codebooks: Codebooks) -> Attached:
        """The codebooks of this rank's heads of the ring's layer."""
        group, layer = get_tp_group(), codebooks.layer(self.ring.index)
        return Attached(books.of_rank(layer, group.rank_in_group, group.world_size), self.served.format,
                        self.num_kv_heads, self.layer.head_dim, self.engine.device)

    def _store(self, kv_cache: torch.Tensor) -> PagedStore:
        """The layer's memory, which vLLM may exchange as long as it measures what it needs."""
        memory = [(x.data_ptr(), x.shape, x.stride()) for x in (kv_cache, self.ring.kv_cache)]
        if self.store is None or memory != self.memory:
            self.memory, self.steps = memory, {}
            self.store = PagedStore(self.served.format, kv_cache.flatten(2), self.ring.rings(), self.served.sinks,
                                    self.attached, self.engine.block_size // PAGE, *dealt(self.engine))
        return self.store

    def _step(self, metadata: LowBitMetadata) -> Step:
        return Step(metadata.table, metadata.seq_lens, metadata.query_start_loc,
                    self.ring.rows[: len(metadata.seq_lens)])

    def _steps(self, store: PagedStore, buffers: PlanBuffers) -> LayerSteps:
        if id(buffers) not in self.steps:
            self.steps[id(buffers)] = LayerSteps(store, buffers)
        return self.steps[id(buffers)]

    def _workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, num_heads_kv, head_dim] of chunks' contexts, of all layers in turn: vLLM's scratch
        memory, which it measures and then locks."""
        return gpu.workspace((self.workspace_tokens, self.num_kv_heads, self.head_size), self.ring.dtype)

    def forward(self, layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: LowBitMetadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("lowbit_attn: quantized outputs, supported: outputs of the model's dtype")
        if attn_metadata is None:  # a run that measures memory
            if current_platform.is_cuda():
                self._workspace()
            return output.fill_(0)
        options = Attention(self.scale, self.softcap, sink_logits=self.sink_logits)
        step, store, plan = self._step(attn_metadata), self._store(kv_cache), attn_metadata.plan
        given = query, key, value, output.view(query.shape), options
        if plan is None:
            self._look(store, step, *given)
        else:
            self._launch(store, step, plan, *given)
        return output

    def _launch(self, store: PagedStore, step: Step, plan: BatchPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                out: torch.Tensor, options: Attention) -> None:
        """A step by its plan, on a GPU."""
        steps = self._steps(store, plan.buffers)
        places = steps.append(plan, step, k, v, self._workspace)
        if store.world > 1:
            paged_ranks.step_attention(steps, of_all_ranks, plan, step, q, k, v, out, options, places, gpu.varlen)
        else:
            steps.attention(plan, step, q, out, options, places, gpu.varlen)

    def _look(self, store: PagedStore, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              out: torch.Tensor, options: Attention) -> None:
        """A step at which the host looks, on a CPU."""
        before = paged.append(store, step, k, v)
        if store.world > 1:
            paged_ranks.attention(store, step, q, k, v, before, out, options, of_all_ranks)
        else:
            attention(store, step, q, k, v, before, out, options)
