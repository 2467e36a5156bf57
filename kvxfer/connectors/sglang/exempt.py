"""Which of SGLang's server arguments cannot change what KV means, and why. Every other one counts: two engines that
differ in it are refused by its name, also one that a later version of SGLang adds. Decides nothing else; must never
know SGLang's classes.

A reason says why the argument changes neither which tokens a prompt is, nor what their KV is, nor how pages hold it.
What only rounds differently does not count: the KV of either engine is valid (docs/safety.md).
"""

from __future__ import annotations

from kvxfer.connectors.common.facts import Exemptions

_NAMES: dict[str, str] = {
    "where the server listens, and how it speaks HTTP": """
        host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port
        grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh api_key admin_api_key smg_http_sidecar_port engine_info_bootstrap_port
    """,
    "the form of answers": """
        enable_response_store served_model_name weight_version file_storage_path enable_cache_report return_input_ids
        return_output_ids stream_interval batch_notify_size stream_response_default_include_usage
        incremental_streaming_output disable_tokenizer_batch_decode detokenizer_worker_num tool_server
        enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk
    """,
    "how tokens are drawn, after their KV is known": """
        sampling_backend grammar_backend sampling_defaults preferred_sampling_params enable_custom_logit_processor
        enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all
        sampling_mask_max_tokens disable_outlines_disk_cache constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt enable_strict_thinking
        enable_fp32_lm_head random_seed mlx_enable_sampling enable_dp_lm_head enable_tp_lm_head_all_to_all
        strip_thinking_cache
    """,
    "logs, metrics, traces and checks": """
        log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
        enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging kv_events_config
        load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
        kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config
        spec_trace_dir enable_layerwise_nvtx_marker expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode
    """,
    "which processes there are, and how they end": """
        base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler
        numa_node gc_threshold skip_server_warmup warmups nccl_port dist_timeout dist_init_addr gated_launch_port
        nnodes node_rank pre_warm_nccl
    """,
    "the role in disaggregation, and its transfers": """
        disaggregation_mode disaggregation_transfer_backend disaggregation_enable_kv_checksum
        disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        optimistic_prefill_attempts mooncake_ib_device
    """,
    "where images are encoded; the encoder's weights are among the model's": """
        encoder_only language_only encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder mm_enable_dp_encoder enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes enable_mm_global_cache
        mm_global_cache_backend mm_feature_transport asr_max_buffer_seconds asr_max_concurrent_sessions
    """,
    "which prompts are computed when, and with how many others": """
        max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval
        prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests
        schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy schedule_conservativeness disable_overlap_schedule num_continuous_decode_steps
        scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay enable_pdmux pdmux_config_path sm_group_num pp_max_micro_batch_size pp_async_batch_depth
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold load_balance_method
        enable_dp_attention_local_control_broadcast enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode tokenizer_worker_num
    """,
    "how much memory there is for pages and states": """
        mem_fraction_static max_total_tokens swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
        swa_prefix_tails max_mamba_cache_size int8_mamba_ckpt_size mamba_full_memory_ratio cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding
        ple_offload_backend ple_offload_dir enable_paged_experts paged_experts_num_resident enable_weights_cpu_backup
        enable_draft_weights_cpu_backup
    """,
    "which prefixes an engine keeps, and where": """
        radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache
        enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
        hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup
        enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file enable_streaming_session
        mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
        mamba_max_states_per_path
    """,
    "when kernels are captured or compiled": """
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs disable_flashinfer_autotune
        flashinfer_autotune_skip_ops
    """,
    "which kernel computes it: another one rounds differently, and either KV is valid": """
        decode_attention_backend prefill_attention_backend mm_attention_backend enable_lean_attention
        enable_nvidia_megakernel enable_amd_monokernel fp8_gemm_runner_backend fp4_gemm_runner_backend
        bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_dsa_fused_indexer mamba_backend linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm
        linear_replayssm_cache_len enable_linear_replayssm_spec moe_runner_backend
        speculative_draft_attention_backend speculative_dsa_topk_backend speculative_moe_runner_backend
        speculative_attention_mode enable_deterministic_inference disable_chunked_prefix_cache kt_cpuinfer
        kt_threadpool_count
    """,
    "how ranks exchange what they compute": """
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        enable_scattered_sconv boundary_reduction speculative_boundary_reduction enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_p2p_check enable_fused_moe_sum_all_reduce moe_a2a_backend
        speculative_moe_a2a_backend deepep_v2_mode deepep_mode fuseep_mode deepep_config
        disable_flashinfer_cutlass_moe_fp4_allgather disable_attn_tp_gather enable_attn_tp_input_scattered
        dcp_comm_backend dcp_replicate_q_proj
    """,
    "which rank computes which part of a layer; what a rank's pages hold is compared": """
        tp_size pp_size dp_size attn_dp_size moe_dp_size dwdp_size ep_size moe_dense_tp_size enable_dp_attention
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp
        enable_megamoe_for_layernorm_sp enable_cp_tp_group_sharing enable_cp_decode_attn_tp ep_join_mode
        ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_backend enable_elastic_expert_backup
        elastic_ep_scale_timeout ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
        eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold enable_waterfill disable_shared_experts_fusion
        enforce_shared_experts_fusion
    """,
    "pages are compared by what they hold, and by their layout if that is not known": """
        page_size c128_page_size enable_page_major_kv_layout enable_unified_memory disable_hybrid_swa_memory
        attention_backend
    """,
    "where weights are, and how they are read: their contents are compared": """
        model_path revision download_dir model_checksum delete_ckpt_after_loading load_format
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load startup_weight_load_mode weight_cache_mode weight_cache_socket
        weight_cache_timeout remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config
        modelopt_checkpoint_save_path modelopt_export_path speculative_draft_model_path
        speculative_draft_model_revision speculative_draft_load_format
        checkpoint_engine_wait_weights_before_ready
    """,
    "how many drafts are tried, and which are taken: the KV of what is taken is the model's": """
        speculative_eagle_topk speculative_num_steps speculative_num_draft_tokens speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
        speculative_adaptive speculative_adaptive_config speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank _speculative_draft_quantization_explicitly_set
        uno_lora_path
    """,
    "it needs LoRA, which is refused": """
        enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
        lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts
        lora_strict_loading lora_drain_wait_threshold
    """,
}
EXEMPT = Exemptions({name: reason for reason, names in _NAMES.items() for name in names.split()})
"""Of SGLang's server arguments, by name."""
