"""Models of transformers' types made small: configurations whose sizes are cut, and whose layers differ as before."""

import inspect

import transformers

# Cut where a configuration has the name; what decides which layers attend stays as the type has it.
SIZES = dict(hidden_size=64, d_model=64, n_embd=64, intermediate_size=32, ffn_dim=32, n_inner=32, num_attention_heads=4,
             n_head=4, n_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=99, max_position_embeddings=256,
             num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
             shared_expert_intermediate_size=32, mamba_d_ssm=64, mamba_d_state=8, mamba_n_heads=4, mamba_d_head=32,
             mamba_n_groups=1, mamba_expand=2, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
             linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
             q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_group=1,
             topk_group=1, vocab_size_per_layer_input=99, hidden_size_per_layer_input=16, sliding_window=8,
             attention_chunk_size=8, lru_width=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MORE = {  # model type: what differs, so that it is small and a step of few tokens is no special case
    "bamba": dict(num_hidden_layers=6, attn_layer_indices=[2, 5]), "bloom": dict(n_layer=2),
    "falcon": dict(num_hidden_layers=2, multi_query=True, new_decoder_architecture=False),
    "falcon_h1": dict(num_hidden_layers=2, mamba_n_heads=2), "gemma2": dict(num_hidden_layers=4),
    "gemma3_text": dict(num_hidden_layers=7),
    "gemma3n_text": dict(num_hidden_layers=10, num_kv_shared_layers=4, intermediate_size=[32] * 10, laurel_rank=8,
                         layer_types=["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 4
                         + ["full_attention"], activation_sparsity_pattern=[0.0] * 10),
    "gemma4_text": dict(num_hidden_layers=6, global_head_dim=32, num_global_key_value_heads=1, num_kv_shared_layers=2,
                        layer_types=["sliding_attention", "full_attention"] * 3),
    "gpt2": dict(n_layer=2, n_positions=256), "gpt_bigcode": dict(n_layer=2, multi_query=True, n_positions=256),
    "gpt_neox": dict(num_hidden_layers=2), "gpt_oss": dict(num_hidden_layers=4),
    "granitemoehybrid": dict(num_hidden_layers=4, layer_types=["mamba", "attention"] * 2),
    "jamba": dict(num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=2, use_mamba_kernels=False,
                  mamba_dt_rank=8),
    "lfm2": dict(num_hidden_layers=4, full_attn_idxs=[1, 3]), "llama": dict(num_hidden_layers=2),
    "llama4_text": dict(num_hidden_layers=4, intermediate_size_mlp=32), "minimax": dict(num_hidden_layers=4),
    "mistral": dict(num_hidden_layers=2), "mixtral": dict(num_hidden_layers=2),
    "mpt": dict(n_layers=2, max_seq_len=256),
    "nemotron_h": dict(hybrid_override_pattern="M-M*-M*-", chunk_size=16, expand=1),
    "olmo_hybrid": dict(num_hidden_layers=4), "opt": dict(num_hidden_layers=2, word_embed_proj_dim=64),
    "phi3": dict(num_hidden_layers=2), "qwen2": dict(num_hidden_layers=4, use_sliding_window=True, max_window_layers=2),
    "qwen2_moe": dict(num_hidden_layers=2), "qwen3_5_text": dict(num_hidden_layers=8),
    "qwen3_next": dict(num_hidden_layers=8), "recurrent_gemma": dict(num_hidden_layers=6, attention_window_size=8),
    "cohere2": dict(num_hidden_layers=4), "exaone4": dict(num_hidden_layers=4), "smollm3": dict(num_hidden_layers=4),
    "zamba2": dict(num_hidden_layers=6, layers_block_type=["mamba", "mamba", "hybrid"] * 2, num_mem_blocks=1,
                   adapter_rank=8, num_key_value_heads=4),
}


def small(kind: str, **options):
    """A configuration of a model type, as transformers reads it from a file; what differs from SIZES and MORE."""
    made = transformers.CONFIG_MAPPING[kind]
    names = {*inspect.signature(made.__init__).parameters, *getattr(made, "attribute_map", {})}
    names |= {name for cls in made.__mro__ for name in getattr(cls, "__annotations__", ())}
    values = {name: value for name, value in SIZES.items() if name in names}
    if kind in MORE and "num_key_value_heads" in MORE[kind]:
        values.pop("num_key_value_heads", None)
    return made.from_dict({"model_type": kind} | values | MORE.get(kind, {}) | options)
