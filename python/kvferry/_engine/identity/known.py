"""The settings of engines that are known: those that fields of `Identity` have, and those that leave KV as it is.

Every other setting counts as one that changes the KV of a prompt. So a setting that a later version of an engine adds
keeps engines apart that differ in it, until it is listed here. It counts if its value is not the default of its class:
versions with and without the setting agree as long as it has its default.

"Leave KV as it is" allows for rounding: engines of other hardware, kernels and parallelism hand KV to each other.
Kernels that lay pages out in another way are told apart by the layout of the cache.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

# What a value without a name of its own is printed with.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class UnnamedError(ValueError):
    """A value that has no name which another process could have: a function, for example."""


def plain(value: Any) -> Any:
    """The same for equal values in all processes. Raises `UnnamedError`."""
    if isinstance(value, str | int | float | bool | None):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [plain(it) for it in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(it) for it in value), key=json.dumps)
    if isinstance(value, type):
        if "<" in value.__qualname__:
            raise UnnamedError(f"the class {value.__qualname__}")
        return f"{value.__module__}.{value.__qualname__}"
    if callable(value):
        raise UnnamedError(f"a function or an object that is called: {type(value).__qualname__}")
    if isinstance(value, PurePath):
        return str(value)
    names = fields_of(value)
    if names:
        return {name: plain(getattr(value, name, None)) for name in names}
    text = str(value)
    if _ADDRESS.search(text) or text == object.__repr__(value):
        raise UnnamedError(f"an object of {type(value).__qualname__}")
    return text


class _Unknown:
    """A default that is not declared."""


_UNKNOWN = _Unknown()


Default = Callable[[], Any]


def fields_of(value: Any) -> dict[str, Default]:
    """The fields of an object of settings, each with what makes its default. Empty for what is none."""
    cls = type(value)
    if dataclasses.is_dataclass(cls):
        return {it.name: _default_of(it) for it in dataclasses.fields(cls)}
    if isinstance(getattr(cls, "model_fields", None), Mapping):
        return {name: _described(it) for name, it in cls.model_fields.items()}
    if isinstance(names := getattr(cls, "__struct_fields__", None), tuple):
        given = cls.__struct_defaults__
        defaults = (*(_unknown for _ in names[len(given) :]), *map(_of_struct, given))
        return dict(zip(names, defaults, strict=True))
    return dict.fromkeys(getattr(value, "__dict__", ()), _unknown)


def _unknown() -> Any:
    return _UNKNOWN


def _default_of(field: dataclasses.Field[Any]) -> Default:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return _unknown if field.default is dataclasses.MISSING else _described(field.default)


def _described(default: Any) -> Default:
    """Of pydantic's description of a field, or of the default itself."""
    if not hasattr(default, "get_default"):
        return lambda: default

    def made() -> Any:
        found = default.get_default(call_default_factory=True)
        return _UNKNOWN if type(found).__name__ == "PydanticUndefinedType" else found

    return made


def _of_struct(default: Any) -> Default:
    if type(default).__name__ == "NoDefaultType":
        return _unknown
    factory: Default = default.factory if type(default).__name__ == "Factory" else lambda: default
    return factory


@dataclass(frozen=True)
class Table:
    """What is known of one class of settings."""

    # How names and messages call it.
    of: str
    # Fields that a field of `Identity` has, or that adapters need otherwise.
    named: frozenset[str]
    # Fields that leave KV as it is, by the reason.
    harmless: Mapping[str, frozenset[str]]
    # Fields that change KV and are in `Identity.settings`, as unknown ones are.
    counted: frozenset[str] = frozenset()
    # Those of `named` that only some versions have, with these versions.
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Of fields that are mappings: entries that leave KV as it is.
    harmless_entries: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    def counts(self, name: str) -> bool:
        """Whether `Identity.settings` has a field, unless it has its default."""
        return not (
            name.startswith("_") or name in self.named or any(name in names for names in self.harmless.values())
        )

    def is_known(self, name: str) -> bool:
        return name in self.counted or not self.counts(name)


class Settings:
    """An object of settings of an engine, which is read through its table: `None` stands for an object without any."""

    def __init__(self, value: Any, table: Table) -> None:
        self.value, self.table = value, table

    def __bool__(self) -> bool:
        return self.value is not None

    def get(self, name: str) -> Any:
        """A setting that the table names. None if the object has none of this name."""
        if name not in self.table.named:
            raise KeyError(f"the table of {self.table.of} does not name {name}")
        return getattr(self.value, name, None)

    def others(self) -> dict[str, Any]:
        """Settings that are not known and have not their defaults, by the names that messages give them."""
        found = {}
        for name, default in fields_of(self.value).items():
            value = getattr(self.value, name, None)
            if isinstance(value, Mapping) and (harmless := self.table.harmless_entries.get(name)):
                value = {key: it for key, it in value.items() if key not in harmless}
            if self.table.counts(name) and not _is_default(value, default):
                found[f"{self.table.of}.{name}"] = value
        return found


def _is_default(value: Any, make: Default) -> bool:
    try:
        default = make()
    except Exception:
        # Of pydantic, which may need more than the class.
        default = _UNKNOWN
    if default is _UNKNOWN:
        return value is None or value is False or (isinstance(value, str | list | tuple | dict | set) and not value)
    try:
        return bool(plain(value) == plain(default))
    except (UnnamedError, RecursionError):
        return value is default


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PARALLEL = "where ranks are; the layout of the cache tells what they have of it"
_MEMORY = "how much memory there is for blocks, and which of them stay"
_ROUNDING = "which kernels compute the same"
_SCHEDULE = "which requests are computed when"
_SAMPLING = "what is done with the last layer's output"
_FRONTEND = "what comes before tokens, and what becomes of them"
_LOGS = "logs, metrics and debugging"
_PLACES = "where files are, and how they are read"
_LAYOUT = "the layout of the cache has it"
_DERIVED = "follows from other settings and from the model's files"
_DRAFTS = "how many tokens are drafted, and which are accepted"

# vLLM 0.32.

VLLM = Table(
    "vllm_config",
    _names(
        """model_config cache_config parallel_config load_config attention_config mamba_config lora_config
        speculative_config compilation_config kv_transfer_config instance_id num_prefill_lookahead_tokens
        use_v2_model_runner"""
    ),
    {
        _SCHEDULE: _names("scheduler_config"),
        _PLACES: _names("device_config offload_config engram_config weight_transfer_config"),
        _ROUNDING: _names("kernel_config optimization_level performance_mode"),
        _SAMPLING: _names("aux_output_config watermark_config structured_outputs_config reasoning_config"),
        _LOGS: _names("observability_config logging_config profiler_config kv_events_config shutdown_timeout"),
        _DERIVED: _names("quant_config"),
        "the encoder's output is the same wherever it is computed": _names("ec_transfer_config ec_manager_config"),
    },
    _names("additional_config diffusion_config"),
    # vLLM puts some of its own options there.
    harmless_entries={"additional_config": _names("gdn_prefill_backend kda_prefill_backend kda_decode_backend")},
)
VLLM_MODEL = Table(
    "model_config",
    _names(
        """model model_weights revision code_revision trust_remote_code quantization quantization_config dtype
        model_impl model_class_overrides hf_config hf_text_config hf_config_path hf_overrides config_format
        max_model_len multimodal_config"""
    ),
    {
        _FRONTEND: _names(
            """tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path
            allowed_media_domains served_model_name io_processor_plugin renderer_num_workers enable_prompt_embeds"""
        ),
        _SAMPLING: _names(
            """runner convert pooler_config seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel
            enable_trace_replay generation_config override_generation_config logits_processors"""
        ),
        _ROUNDING: _names("enforce_eager disable_cascade_attn"),
        _MEMORY: _names(
            """enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
            enable_nccl_comm_suspend enable_cumem_allocator"""
        ),
        _PLACES: _names("hf_token"),
        _DERIVED: _names(
            """is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len
            allow_deprecated_quantization"""
        ),
    },
    _names("disable_sliding_window"),
)
VLLM_LOAD = Table(
    "load_config",
    _names("load_format model_loader_extra_config download_dir"),
    {
        _PLACES: _names(
            """safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
            pt_load_map_location"""
        ),
        _LOGS: _names("use_tqdm_on_load"),
    },
    _names("ignore_patterns"),
)
VLLM_CACHE = Table(
    "cache_config",
    _names(
        """cache_dtype mamba_cache_dtype mamba_ssm_cache_dtype kv_cache_dtype_skip_layers enable_prefix_caching
        calculate_kv_scales"""
    ),
    {
        _MEMORY: _names(
            """gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend"""
        ),
        _LAYOUT: _names(
            """block_size user_specified_block_size kv_cache_layout is_attention_free sliding_window
            mamba_page_size_padded skip_page_size_padded mamba_block_size effective_attention_block_size"""
        ),
        "which blocks vLLM's own cache finds": _names(
            """prefix_match_unit prefix_caching_hash_algo prefix_cache_retention_interval mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint hash_block_size cache_hit_alignment_tokens"""
        ),
        "layers that have no KV of their own skip tokens": _names("kv_sharing_fast_prefill"),
        _DRAFTS: _names("use_kda_recoverssm"),
    },
    _names("replayssm_buffer_len swa_bounded_replay use_replayssm"),
    {"calculate_kv_scales": "versions before 0.32"},
)
VLLM_ATTENTION = Table(
    "attention_config",
    _names("indexer_kv_dtype"),
    {
        _ROUNDING: _names(
            """backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
            use_trtllm_attention mla_prefill_backend indexer_sparse_logits sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size"""
        ),
        _MEMORY: _names("hisparse_config"),
    },
    _names("disable_flashinfer_q_quantization use_non_causal use_prefill_query_quantization"),
)
VLLM_MAMBA = Table(
    "mamba_config",
    frozenset(),
    {_ROUNDING: _names("backend ssu_algorithm stochastic_rounding_philox_rounds")},
    _names("enable_stochastic_rounding"),
)
VLLM_LORA = Table(
    "lora_config",
    _names("lora_dtype enable_tower_connector_lora"),
    {
        _MEMORY: _names("max_lora_rank max_loras max_cpu_loras"),
        _ROUNDING: _names("fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format"),
        _SAMPLING: _names("max_lora_cls_labels"),
        "the request has the adapter": _names("default_mm_loras"),
    },
    _names("enable_moe_shared_loras target_modules"),
)
VLLM_MEDIA = Table(
    "multimodal_config",
    _names(
        """language_model_only mm_processor_kwargs mm_device_do_normalize mm_processor_cache_gb mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method"""
    ),
    {
        _FRONTEND: _names("limit_per_prompt enable_mm_embeds interleave_mm_strings mm_encoder_only"),
        "vLLM names media by what it has read of them": _names("media_io_kwargs mm_hasher_algorithm"),
        _MEMORY: _names(
            """mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc
            mm_ipc_gpu_memory_gb"""
        ),
        _ROUNDING: _names("mm_encoder_attn_backend mm_encoder_tp_mode"),
        _LOGS: _names("mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
        # vLLM sets it where KV or the encoder's output come from another engine.
        _DERIVED: _names("allow_missing_mm_embeddings"),
    },
)
VLLM_DRAFT = Table(
    "speculative_config",
    _names("draft_model_config draft_load_config kv_cache_dtype quantization"),
    {
        _DERIVED: _names(
            "model revision code_revision target_model_config target_parallel_config draft_parallel_config"
        ),
        _PARALLEL: _names("draft_tensor_parallel_size tensor_parallel_size"),
        _ROUNDING: _names(
            "enforce_eager moe_backend attention_backend disable_padded_drafter_batch use_local_argmax_reduction"
        ),
        _DRAFTS: _names(
            """num_speculative_tokens method max_model_len index_share_for_mtp_iteration disable_eagle_block_drop
            prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
            enable_adaptive_verification draft_sample_method dspark_draft_topk"""
        ),
    },
    _names("parallel_drafting use_heterogeneous_vocab"),
)

# SGLang 0.5.23.

SGLANG = Table(
    "server_args",
    _names(
        """model_path revision download_dir trust_remote_code load_format model_loader_extra_config quantization
        quantization_param_path modelopt_quant quantize_and_serve rl_quant_profile kt_weight_path dtype weight_version
        model_impl json_model_override_args kv_cache_dtype lora_paths mm_process_config image_processor_backend
        disable_fast_image_processor speculative_algorithm speculative_draft_model_path
        speculative_draft_model_revision speculative_draft_model_quantization speculative_draft_load_format
        speculative_draft_kv_cache_dtype port use_ray"""
    ),
    {
        _PLACES: _names(
            """device base_gpu_id gpu_id_step mlx_enable_sampling custom_sigquit_handler numa_node gc_threshold
            cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
            ple_offload_embedding ple_offload_backend ple_offload_dir modelopt_checkpoint_save_path
            modelopt_export_path startup_weight_load_mode weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
            remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port model_checksum
            delete_ckpt_after_loading checkpoint_engine_wait_weights_before_ready weight_cache_mode
            weight_cache_socket weight_cache_timeout"""
        ),
        _SAMPLING: _names(
            """random_seed enable_fp32_lm_head enable_custom_logit_processor enable_watermark watermark_config
            watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
            watermark_max_probability watermark_default_enabled watermark_enforce_all enable_return_hidden_states
            return_hidden_states_mode enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk
            sampling_mask_max_tokens enable_mis is_embedding sampling_defaults preferred_sampling_params"""
        ),
        _LOGS: _names(
            """watchdog_timeout soft_watchdog_timeout log_level log_level_http log_requests log_requests_level
            log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder
            show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
            load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
            tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
            bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
            gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging kv_events_config
            load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
            kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
            debug_tensor_dump_input_file msprobe_dump_config"""
        ),
        _SCHEDULE: _names(
            """sleep_on_idle enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
            dllm_fdfo max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval
            prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests
            schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
            abort_on_priority_when_disabled schedule_low_priority_values_first
            priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_prefix_tails
            disable_hybrid_swa_memory prefill_only_disable_kv_cache disable_chunked_prefix_cache
            disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
            enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
            prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay"""
        ),
        _PARALLEL: _names(
            """decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
            disaggregation_mode disaggregation_decode_allocation_policy disaggregation_transfer_backend
            disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
            disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
            disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval enable_pd_role_switch optimistic_prefill_attempts language_only
            language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
            enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num
            disaggregation_decode_host_receive_threshold nccl_port dist_timeout dist_init_addr gated_launch_port
            nnodes node_rank tp_size dcp_size pp_size pp_max_micro_batch_size pp_async_batch_depth dp_size
            attn_dp_size load_balance_method attn_cp_size moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj
            enable_prefill_cp cp_strategy enable_cp_tp_group_sharing enable_dsa_cache_layer_split
            enable_cp_decode_attn_tp enable_kv_cache_sharding enable_dp_attention
            enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
            enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size
            enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather
            enable_p2p_check ep_size moe_dense_tp_size ep_join_rank_offset elastic_ep_initial_size max_ep_size"""
        ),
        _FRONTEND: _names(
            """encoder_only disable_outlines_disk_cache enable_multimodal enable_broadcast_mm_inputs_process
            enable_prefix_mm_cache mm_enable_dp_encoder mm_processor_worker_num mm_io_worker_num allowed_media_domains
            media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request enable_mm_global_cache
            mm_global_cache_backend mm_feature_transport context_length enable_response_store tokenizer_path
            tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init host
            fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port
            grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups
            enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
            ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name chat_template
            trust_request_chat_template hf_chat_template_name completion_template file_storage_path
            enable_cache_report return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs
            strip_thinking_cache enable_strict_thinking tool_call_parser tool_server asr_max_buffer_seconds
            asr_max_concurrent_sessions allow_auto_truncate stream_interval batch_notify_size
            stream_response_default_include_usage incremental_streaming_output enable_streaming_session
            constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
            dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode"""
        ),
        _ROUNDING: _names(
            """enable_tf32_matmul attention_backend decode_attention_backend enable_lean_attention
            enable_nvidia_megakernel enable_amd_monokernel prefill_attention_backend sampling_backend grammar_backend
            fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend
            dsa_triton_union dsa_decode_backend dsv4_attn_backend dsa_paged_mqa_logits_backend dsa_topk_backend
            disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
            triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
            enable_fused_qk_norm_rope enable_dsa_fused_indexer mamba_backend mamba_cache_philox_rounds
            linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
            linear_replayssm_cache_len enable_linear_replayssm_spec cuda_graph_config cuda_graph_backend_decode
            cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
            cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
            disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
            enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_torch_compile
            enable_torch_compile_debug_mode torch_compile_max_bs enable_layerwise_nvtx_marker enable_nccl_nvls
            enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem enable_scattered_sconv
            pre_warm_nccl boundary_reduction enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode
            moe_runner_backend deepep_mode fuseep_mode flashinfer_a2a_dispatch_type ep_num_redundant_experts
            ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
            eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
            expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
            deepep_config elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device enable_waterfill
            ep_join_mode elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather
            disable_shared_experts_fusion enforce_shared_experts_fusion enable_paged_experts
            paged_experts_num_resident kt_cpuinfer kt_threadpool_count enable_deterministic_inference lora_backend
            max_lora_chunk_size lora_use_virtual_experts mm_attention_backend"""
        ),
        _MEMORY: _names(
            """enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup mamba_max_states_per_path
            mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval int8_mamba_ckpt_size enable_lora
            enable_lora_overlap_loading max_lora_rank max_loaded_loras max_loras_per_batch lora_eviction_policy
            lora_drain_wait_threshold radix_eviction_policy radix_eviction_policy_config disable_radix_cache
            enable_page_major_kv_layout enable_unified_memory enable_session_radix_cache radix_cache_backend
            enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction
            hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
            hicache_storage_prefetch_policy hicache_storage_backend_extra_config
            hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
            enable_unified_cache_external_linker unified_cache_external_linker_backend
            unified_cache_external_linker_config enable_linker_mla_dedup enable_hisparse hisparse_config
            enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file mem_fraction_static max_total_tokens
            swa_full_tokens_ratio max_mamba_cache_size mamba_full_memory_ratio"""
        ),
        _LAYOUT: _names("""page_size c128_page_size"""),
        _DRAFTS: _names(
            """speculative_boundary_reduction speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
            speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size
            speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
            speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
            speculative_token_map speculative_attention_mode speculative_draft_attention_backend
            speculative_dsa_topk_backend speculative_moe_runner_backend speculative_moe_a2a_backend
            speculative_adaptive speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
            speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
            speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
            speculative_ngram_external_corpus_max_tokens"""
        ),
    },
    _names(
        """enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay prefill_kv_cache_dequant_dtype
        enable_deepseek_v4_fp4_indexer enable_precise_embedding_interpolation qsa_indexer_dtype mamba_ssm_dtype
        enable_mamba_cache_stochastic_rounding enable_int8_mamba_checkpoint enable_linear_replayssm
        enable_quant_communications enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision
        deepep_dispatcher_output_dtype kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token dllm_algorithm
        dllm_algorithm_config rl_on_policy_target lora_target_modules experts_shared_outer_loras lora_strict_loading
        forward_hooks model_config_parser custom_weight_loader decrypted_config_file
        modelopt_checkpoint_restore_path modelexpress_config trust_mm_content_hashes uno_lora_path
        speculative_draft_window_size speculative_draft_sink_size enable_multi_layer_eagle
        speculative_enable_w4a4_mxfp4_megamoe decrypted_draft_config_file"""
    ),
)

# TensorRT-LLM, whose tables were written from its sources: no version of it was run.

TRTLLM = Table(
    "llm_args",
    _names(
        """model revision trust_remote_code load_format dtype quant_config kv_cache_config max_seq_len model_kwargs
        speculative_config"""
    ),
    {
        _PARALLEL: _names(
            """tensor_parallel_size pipeline_parallel_size context_parallel_size gpus_per_node moe_cluster_parallel_size
            moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp attention_dp_config cp_config
            enable_lm_head_tp_in_adp parallel_config mapping allreduce_strategy orchestrator_type
            ray_worker_extension_cls cache_transceiver_config kv_connector_config mpi_session"""
        ),
        _SCHEDULE: _names(
            """scheduler_config max_batch_size max_input_len max_num_tokens max_beam_width enable_chunked_prefill
            disable_overlap_scheduler batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio
            batching_type build_config fail_fast_on_attention_window_too_large"""
        ),
        _ROUNDING: _names(
            """backend moe_config cuda_graph_config torch_compile_config enable_autotuner enable_min_latency"""
        ),
        _SAMPLING: _names(
            """sampler_type batched_logits_processor guided_decoding_backend gather_generation_logits decoding_config
            normalize_log_probs stream_interval"""
        ),
        _FRONTEND: _names(
            """tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init num_postprocess_workers
            postprocess_tokenizer_dir reasoning_parser mm_encoder_only"""
        ),
        _LOGS: _names(
            """iter_stats_max_iterations request_stats_max_iterations return_perf_metrics perf_metrics_max_requests
            enable_iter_perf_stats enable_iter_req_stats print_iter_log enable_layerwise_nvtx_marker
            garbage_collection_gen0_threshold"""
        ),
        _PLACES: _names("checkpoint_loader checkpoint_format workspace embedding_parallel_mode"),
        "requests with adapters have no KV in the store": _names("enable_lora lora_config peft_cache_config"),
    },
    # Each attention backend has an order of its own for the elements of a page.
    _names("force_dynamic_quantization sparse_attention_config attn_backend"),
    {"model_kwargs": "newer versions"},
)
TRTLLM_QUANTIZATION = Table(
    "quant_config",
    _names("quant_algo kv_cache_quant_algo"),
    {},
    _names("group_size smoothquant_val clamp_val use_meta_recipe has_zero_point pre_quant_scale exclude_modules"),
)
TRTLLM_CACHE = Table(
    "kv_cache_config",
    _names("dtype"),
    {
        _LAYOUT: _names("tokens_per_block max_attention_window sink_token_length use_kv_cache_manager_v2"),
        _MEMORY: _names(
            """enable_block_reuse enable_partial_reuse copy_on_partial_reuse max_tokens free_gpu_memory_fraction
            host_cache_size onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority
            event_buffer_max_size attention_dp_events_gather_period_ms max_gpu_total_bytes use_uvm
            max_util_for_resume pool_ratio"""
        ),
    },
)
