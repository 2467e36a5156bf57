"""The settings of vLLM that do not count as facts of an engine, each with the reason why it cannot change what its KV
means. Every other field of VllmConfig and of what is in it counts, and so does every variable of vLLM's that is set
(:mod:`.facts`): what this file does not name is compared.

A name that ends with ``.*`` stands for a whole part. Kept for parts whose only purpose is named beside them; the parts
in which KV is decided are listed field by field, so that a new field of one counts.
"""

from __future__ import annotations

from kvxfer.connectors.common.facts import Exemptions

ROUNDING = "the same computation by another kernel: it may round differently, and either KV is valid"
RECORD = "compared as what it became: a field of the record"
CONTENT = "compared by content: of the weights, of the model's config, or of the prompt's tokens"
TEXT = "what becomes of text before there are tokens, or after: tokens are compared"
SAMPLING = "only the decode engine draws tokens, as it would alone"
SCHEDULE = "when and beside which others a prompt is computed"
MEMORY = "how much memory there is, or where weights and blocks lie in it"
PLACES = "addresses, names and processes of one engine"
RANKS = "how ranks divide the work: the record says which layers and heads each keeps"
REFUSED = "refused at start where it matters"
TELLING = "logs, metrics, traces and profiles"
GRAPHS = "how kernels are compiled and launched: rounding apart, they compute the same"
CACHING = "which blocks are found again, by their tokens; not what is in them"
DERIVED = "vLLM derives it from settings that count"
MODALITY = "how many inputs of a kind, and where they are processed; what they become is in the content digest"


def _each(prefix: str, reason: str, names: str) -> dict[str, str]:
    return {f"{prefix}{name}": reason for name in names.split()}


MODEL = {
    **_each("", CONTENT, "model model_weights revision hf_config hf_text_config hf_config_path hf_overrides"),
    **_each("", CONTENT, "word_embeddings_untied_by_checkpoint config_format"),
    **_each("", TEXT, "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers"),
    **_each("", TEXT, "allowed_local_media_path allowed_media_domains io_processor_plugin enable_trace_replay"),
    **_each("", SAMPLING, "seed max_logprobs logprobs_mode use_fp64_gumbel generation_config return_sampling_mask"),
    **_each("", SAMPLING, "override_generation_config logits_processors "),
    **_each("", PLACES, "served_model_name hf_token is_submodel_config"),
    **_each("", GRAPHS, "enforce_eager disable_cascade_attn"),
    **_each("", REFUSED, "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend"),
    **_each("", REFUSED, "sleep_mode_offload_cudagraph enable_return_routed_experts"),
    **_each("", MEMORY, "enable_nccl_comm_suspend enable_cumem_allocator"),
    **_each("", "an engine that takes part generates", "runner convert"),
    "enable_prompt_embeds": "prompts of embeddings are never kept or fetched",
    "max_model_len": "how long a prompt may be; it counts where rotary embeddings are chosen by it",
    "spec_target_max_model_len": DERIVED,
    "allow_deprecated_quantization": "whether a warning is an error",
    "pooler_config.*": "what is made of hidden states after the last layer",
    **_each("multimodal_config.", MODALITY, "limit_per_prompt language_model_only mm_encoder_only mm_encoder_tp_mode"),
    **_each("multimodal_config.", MEMORY, "mm_processor_cache_gb mm_processor_cache_type mm_ipc_gpu_memory_gb"),
    **_each("multimodal_config.", MEMORY, "mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc"),
    **_each("multimodal_config.", ROUNDING, "mm_encoder_attn_backend"),
    **_each("multimodal_config.", TELLING, "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
}
"""Of ModelConfig, of the model and of a draft model."""

PARALLEL = {
    **_each("", RANKS, "pipeline_parallel_size tensor_parallel_size data_parallel_size data_parallel_size_local"),
    **_each("", RANKS, "data_parallel_rank data_parallel_rank_local data_parallel_index world_size rank is_moe_model"),
    **_each("", RANKS, "enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config.* enable_elastic_ep"),
    **_each("", RANKS, ""),
    **_each("", RANKS, "expert_placement_strategy elastic_ep_max_dp_size enable_hc_sp enable_batch_sharded_sampling"),
    **_each("", REFUSED, "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size"),
    **_each("", REFUSED, "dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size"),
    **_each("", REFUSED, "_allow_auto_resolve_cp_interleave_size"),
    **_each("", PLACES, "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port"),
    **_each("", PLACES, "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb master_addr"),
    **_each("", PLACES, "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus _coord_store_port"),
    **_each("", PLACES, "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds"),
    **_each("", PLACES, "_data_parallel_master_port_list _api_process_count _api_process_rank ray_runtime_env"),
    **_each("", PLACES, "ray_workers_use_nsight placement_group distributed_executor_backend dp_sync_interval"),
    **_each("", PLACES, "max_parallel_loading_workers enable_fault_tolerance fault_tolerance_config.*"),
    **_each("", PLACES, "sd_worker_cls "),
    **_each("", ROUNDING, "all2all_backend disable_custom_all_reduce enable_shm_tensor_arena"),
    **_each("", ROUNDING, "disable_nccl_for_dp_synchronization"),
    **_each("", SCHEDULE, "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"),
}
LOAD = {
    "load_format": "weights are compared by content; of formats that read no files they are unknown",
    **_each("", PLACES, "download_dir device pt_load_map_location use_tqdm_on_load"),
    **_each("", MEMORY, "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size"),
}
CACHE = {
    **_each("", RECORD, "block_size user_specified_block_size kv_cache_layout cache_dtype _block_size_resolved"),
    **_each(
        "", RECORD, "mamba_block_size mamba_page_size_padded skip_page_size_padded user_specified_mamba_block_size"
    ),
    **_each("", RECORD, "effective_attention_block_size hash_block_size cache_hit_alignment_tokens"),
    **_each("", MEMORY, "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "),
    **_each("", MEMORY, "kv_cache_memory_bytes kv_cache_size_tokens kv_cache_max_concurrency"),
    **_each("", CACHING, "enable_prefix_caching prefix_caching_hash_algo prefix_match_unit"),
    **_each("", CACHING, "prefix_cache_retention_interval kv_offloading_size kv_offloading_backend"),
    **_each("", CACHING, "mamba_cache_mode enable_mamba_shared_prefix_checkpoint swa_bounded_replay"),
    **_each("", DERIVED, "is_attention_free sliding_window"),
}
ATTENTION = {
    **_each("", RECORD, "backend backend_per_kind"),
    **_each("", ROUNDING, "flash_attn_version use_trtllm_attention mla_prefill_backend sparse_mla_force_mqa"),
    **_each("", ROUNDING, "minimax_m3_msa_decode_backend use_prefill_decode_attention "),
    **_each("", ROUNDING, ""),
    **_each("", GRAPHS, "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph"),
    **_each("", GRAPHS, "tokenspeed_mla_min_split_kv flex_attn_block_m flex_attn_block_n flex_attn_q_block_size"),
    **_each("", GRAPHS, "flex_attn_kv_block_size"),
    **_each("", MEMORY, "sparse_mla_prefill_workspace_factor hisparse_config.*"),
}
SPECULATIVE = {
    **_each("", CONTENT, "model revision code_revision"),
    **_each("", RANKS, "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config target_parallel_config"),
    **_each("", ROUNDING, "moe_backend attention_backend enforce_eager"),
    **_each("", SAMPLING, "num_speculative_tokens rejection_sample_method synthetic_acceptance_rates"),
    **_each("", SAMPLING, "synthetic_acceptance_length enable_adaptive_verification draft_sample_method"),
    **_each("", SAMPLING, "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth prompt_lookup_max"),
    **_each("", SAMPLING, "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor prompt_lookup_min"),
    **_each("", SAMPLING, "suffix_decoding_min_token_prob dspark_draft_topk use_local_argmax_reduction"),
    **_each("", SAMPLING, ""),
    **_each("", SCHEDULE, "disable_padded_drafter_batch disable_eagle_block_drop max_model_len"),
    "target_model_config": "it is model_config",
    "draft_model_config": "compared as the facts that begin with draft",
}
"""Of SpeculativeConfig, where a draft model has layers in the cache."""
LORA = {
    **_each("", MEMORY, "max_lora_rank max_loras max_cpu_loras fully_sharded_loras specialize_active_lora"),
    **_each("", MEMORY, "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"),
    "lora_dtype": "in the content digest of prompts with an adapter",
    "default_mm_loras": "a request has the adapter that it names: in the content digest",
}
SCHEDULER = _each(
    "scheduler_config.",
    SCHEDULE,
    "runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
    "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens "
    "enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens encoder_cache_size policy "
    "disable_chunked_mm_input disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark "
    "prefill_schedule_interval async_scheduling stream_interval "
    "scheduler_cls",
)
COMPILATION = _each(
    "compilation_config.",
    GRAPHS,
    "mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap splitting_ops "
    "compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets "
    "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay "
    "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints "
    "inductor_compile_config inductor_passes cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes "
    "cudagraph_copy_inputs cudagraph_specialize_lora use_inductor_graph_partition max_cudagraph_capture_size "
    "dynamic_shapes_config.* local_cache_dir fast_moe_cold_start enabled_custom_ops disabled_custom_ops "
    "traced_files compilation_time encoder_compilation_time static_forward_context static_all_moe_layers ",
) | _each(
    "compilation_config.pass_config.",
    ROUNDING,
    "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms enable_qk_norm_rope_fusion "
    "fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
    "rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb enable_sp fuse_gemm_comms sp_min_token_num",
)
PARTS = {
    **_each("", TELLING, "observability_config.* logging_config.* profiler_config.* kv_events_config.*"),
    **_each("", SAMPLING, "structured_outputs_config.* reasoning_config.* watermark_config.*"),
    **_each("", PLACES, "kv_transfer_config.* ec_transfer_config.* ec_manager_config.* instance_id shutdown_timeout"),
    **_each("", MEMORY, "offload_config.* engram_config.*"),
    **_each("", ROUNDING, "kernel_config.* mamba_config.backend mamba_config.ssu_algorithm"),
    **_each("", GRAPHS, "optimization_level performance_mode"),
    **_each("", REFUSED, "aux_output_config.*"),
    "weight_transfer_config.*": "weights that change in memory are unknown",
    "device_config.device": RECORD,
    "quant_config": DERIVED,
}


def _below(part: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{part}.{name}": reason for name, reason in names.items()}


CONFIG = Exemptions(
    {
        **PARTS,
        **SCHEDULER,
        **COMPILATION,
        **_below("model_config", MODEL),
        **_below("parallel_config", PARALLEL),
        **_below("load_config", LOAD),
        **_below("cache_config", CACHE),
        **_below("attention_config", ATTENTION),
        **_below("lora_config", LORA),
        **_below("speculative_config", SPECULATIVE),
        **_below("speculative_config.draft_load_config", LOAD),
    }
)
DRAFT = Exemptions(_below("draft", MODEL))
