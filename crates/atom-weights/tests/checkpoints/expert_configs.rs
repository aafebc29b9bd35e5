//! config.json of families with experts: as published, defaults, and what is refused.

use crate::common::{MOE_FAMILIES, config_with, moe_config, refused, says, synthetic};
use atom_weights::{Checkpoint, ModelConfig, MoeConfig, QkNorm, Scoring, family};
use serde_json::{Value, json};

/// The message for a configuration with some keys changed.
fn refusal(family: &str, changes: &Value) -> String {
    refused(Checkpoint::synthetic(&config_with(family, changes).to_string(), 0))
}

fn parsed(family: &str, changes: &Value) -> ModelConfig {
    synthetic(&config_with(family, changes)).config().clone()
}

fn moe(family: &str, changes: &Value) -> MoeConfig {
    parsed(family, changes).moe.unwrap()
}

/// The configuration of a large model, whose weights can't be made: it is parsed, and then refused for
/// its size.
fn published(text: &str, bytes: &str) {
    says(&refused(Checkpoint::synthetic(text, 0)), &["a synthetic model of this configuration takes", bytes]);
}

/// 30.5, 46.7, 352.8 and 228.7 billion parameters, as transformers counts them; four bytes each.
#[test]
fn published_files_are_read() {
    published(QWEN3_30B_A3B, "122128490496");
    published(MIXTRAL_8X7B, "186811170816");
    published(GLM_4_5, "1411191316096");
    published(MINIMAX_M2, "914759059456");
    // The last with the name that its first files had.
    published(&MINIMAX_M2.replace("\"minimax_m2\"", "\"minimax\""), "914759059456");
}

#[test]
fn every_number_of_the_experts_is_read() {
    let base = MoeConfig {
        experts: 8,
        top_k: 3,
        expert_width: 32,
        shared_width: 0,
        dense_layers: vec![false, false],
        scoring: Scoring::Softmax,
        selection_bias: false,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    };
    assert_eq!(moe("qwen3_moe", &json!({})), base);
    assert_eq!(moe("mixtral", &json!({})), MoeConfig { top_k: 2, ..base.clone() });
    let sigmoid = MoeConfig { scoring: Scoring::Sigmoid, selection_bias: true, ..base };
    assert_eq!(moe("minimax_m2", &json!({})), sigmoid);
    let glm = MoeConfig {
        shared_width: 64,
        dense_layers: vec![true, false],
        groups: 4,
        groups_kept: 2,
        scale: 2.5,
        ..sigmoid
    };
    assert_eq!(moe("glm4_moe", &json!({})), glm);

    let of = |family: &str| {
        let config = parsed(family, &json!({}));
        (config.qk_norm, config.rope.dim, config.attention_bias, config.output_bias())
    };
    assert_eq!(of("qwen3_moe"), (QkNorm::PerHead, 32, false, false));
    assert_eq!(of("mixtral"), (QkNorm::None, 32, false, false));
    assert_eq!(of("glm4_moe"), (QkNorm::PerHead, 16, true, false));
    assert_eq!(of("minimax_m2"), (QkNorm::Whole, 16, false, false));
    let biased = parsed("qwen3_moe", &json!({"attention_bias": true}));
    assert!(biased.attention_bias && biased.output_bias());
}

#[test]
fn absent_keys_mean_what_the_reference_says() {
    let qwen = json!({"decoder_sparse_step": null, "mlp_only_layers": null, "norm_topk_prob": null});
    let found = moe("qwen3_moe", &qwen);
    assert_eq!((found.dense_layers, found.normalise), (vec![false, false], false));
    let glm = json!({"n_shared_experts": null, "first_k_dense_replace": null, "n_group": null,
        "topk_group": null, "routed_scaling_factor": null, "norm_topk_prob": null, "use_qk_norm": null,
        "attention_bias": null, "partial_rotary_factor": null});
    let found = parsed("glm4_moe", &glm);
    assert_eq!((found.qk_norm, found.attention_bias, found.rope.dim), (QkNorm::None, false, 16));
    let found = found.moe.unwrap();
    assert_eq!((found.shared_width, found.groups, found.groups_kept), (32, 1, 1));
    assert_eq!((found.dense_layers, found.normalise, found.scale), (vec![true, false], true, 1.0));
    let minimax = json!({"rotary_dim": null, "use_routing_bias": null, "scoring_func": null});
    let found = parsed("minimax_m2", &minimax);
    assert_eq!((found.rope.dim, found.moe.unwrap().selection_bias), (32, true));
    assert!(!moe("minimax_m2", &json!({"use_routing_bias": false})).selection_bias);
    // The number of experts has aliases.
    for key in ["num_experts", "num_local_experts"] {
        for family in ["qwen3_moe", "mixtral", "minimax_m2"] {
            let mut changes = json!({"num_experts": null, "num_local_experts": null});
            changes[key] = json!(16);
            assert_eq!(moe(family, &changes).experts, 16);
        }
    }
}

#[test]
fn layers_without_experts_are_those_that_the_file_says() {
    let dense = |family: &str, changes: Value| {
        let mut all = json!({"num_hidden_layers": 6});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let config = parsed(family, &all);
        (0..6).filter(|&layer| config.is_dense(layer)).collect::<Vec<_>>()
    };
    assert_eq!(dense("qwen3_moe", json!({"decoder_sparse_step": 3})), [0, 1, 3, 4]);
    assert_eq!(dense("qwen3_moe", json!({"mlp_only_layers": [5, 0]})), [0, 5]);
    assert_eq!(dense("qwen3_moe", json!({"mlp_only_layers": [1], "decoder_sparse_step": 2})), [0, 1, 2, 4]);
    assert_eq!(dense("glm4_moe", json!({"first_k_dense_replace": 0})), Vec::<usize>::new());
    assert_eq!(dense("glm4_moe", json!({"first_k_dense_replace": 6})), [0, 1, 2, 3, 4, 5]);
    assert_eq!(dense("mixtral", json!({})), Vec::<usize>::new());
    assert_eq!(dense("llama", json!({})), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn the_tensors_are_those_of_the_layers() {
    let config = parsed("glm4_moe", &json!({}));
    let specs = family::tensors(&config);
    let shape = |name: &str| specs.iter().find(|spec| spec.name == name).map(|spec| spec.shape.clone());
    for (name, expected) in [
        ("model.layers.0.mlp.gate_proj.weight", Some(vec![96, 64])),
        ("model.layers.0.mlp.gate.weight", None),
        ("model.layers.0.self_attn.q_norm.weight", Some(vec![32])),
        ("model.layers.0.self_attn.v_proj.bias", Some(vec![64])),
        ("model.layers.0.self_attn.o_proj.bias", None),
        ("model.layers.1.mlp.gate_proj.weight", None),
        ("model.layers.1.mlp.gate.weight", Some(vec![8, 64])),
        ("model.layers.1.mlp.gate.e_score_correction_bias", Some(vec![8])),
        ("model.layers.1.mlp.experts.7.up_proj.weight", Some(vec![32, 64])),
        ("model.layers.1.mlp.experts.7.down_proj.weight", Some(vec![64, 32])),
        ("model.layers.1.mlp.experts.8.down_proj.weight", None),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", Some(vec![64, 64])),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", Some(vec![64, 64])),
    ] {
        assert_eq!(shape(name), expected, "{name}");
    }
    let specs = family::tensors(&parsed("minimax_m2", &json!({})));
    let shape = |name: &str| specs.iter().find(|spec| spec.name == name).map(|spec| spec.shape.clone());
    assert_eq!(shape("model.layers.1.self_attn.q_norm.weight"), Some(vec![4 * 32]));
    assert_eq!(shape("model.layers.1.self_attn.k_norm.weight"), Some(vec![2 * 32]));
    assert_eq!(shape("model.layers.1.mlp.shared_experts.gate_proj.weight"), None);
}

#[test]
fn numbers_that_contradict_each_other_are_named() {
    for (family, changes, parts) in [
        ("qwen3_moe", json!({"num_experts": null}), &["num_experts is missing"][..]),
        ("mixtral", json!({"num_local_experts": null}), &["num_local_experts is missing"]),
        ("glm4_moe", json!({"n_routed_experts": null}), &["n_routed_experts is missing"]),
        ("mixtral", json!({"num_experts_per_tok": null}), &["num_experts_per_tok is missing"]),
        ("qwen3_moe", json!({"moe_intermediate_size": null}), &["moe_intermediate_size is missing"]),
        ("qwen3_moe", json!({"num_local_experts": 4}), &["num_local_experts is 4", "num_experts is 8"]),
        ("mixtral", json!({"num_local_experts": 0}), &["num_local_experts is 0", "1 to 4096"]),
        ("mixtral", json!({"num_local_experts": 5000}), &["num_local_experts is 5000", "1 to 4096"]),
        (
            "mixtral",
            json!({"num_experts_per_tok": 9}),
            &["num_experts_per_tok is 9", "num_local_experts = 8"],
        ),
        (
            "mixtral",
            json!({"num_local_experts": 4096, "num_hidden_layers": 33}),
            &["num_local_experts is 4096", "33 layers", "131072"],
        ),
        ("glm4_moe", json!({"n_group": 3}), &["n_group is 3", "n_routed_experts = 8"]),
        ("glm4_moe", json!({"topk_group": 5}), &["topk_group is 5", "n_group = 4"]),
        ("glm4_moe", json!({"n_group": 8}), &["n_group is 8", "one expert"]),
        (
            "glm4_moe",
            json!({"topk_group": 1}),
            &["num_experts_per_tok is 3", "1 kept groups of 2 have 2 experts"],
        ),
        ("glm4_moe", json!({"routed_scaling_factor": 0}), &["routed_scaling_factor is 0"]),
        ("glm4_moe", json!({"routed_scaling_factor": "2"}), &["routed_scaling_factor is \"2\""]),
        (
            "glm4_moe",
            json!({"n_shared_experts": 4096, "moe_intermediate_size": 1024}),
            &["n_shared_experts is 4096"],
        ),
        ("glm4_moe", json!({"first_k_dense_replace": 3}), &["first_k_dense_replace is 3", "0 to 2"]),
        ("qwen3_moe", json!({"decoder_sparse_step": 0}), &["decoder_sparse_step is 0"]),
        ("qwen3_moe", json!({"mlp_only_layers": [2]}), &["mlp_only_layers holds 2", "below 2"]),
        ("qwen3_moe", json!({"mlp_only_layers": [-1]}), &["mlp_only_layers holds -1"]),
        ("qwen3_moe", json!({"mlp_only_layers": 1}), &["mlp_only_layers is 1", "a list"]),
        ("minimax_m2", json!({"rotary_dim": 33}), &["rotary_dim is 33", "1 to 32"]),
        ("minimax_m2", json!({"rotary_dim": 15}), &["15 rotated elements"]),
        (
            "minimax_m2",
            json!({"partial_rotary_factor": 0.25}),
            &["rotary_dim is 16", "partial_rotary_factor = 0.25", "head's 32 is 8"],
        ),
        ("minimax_m2", json!({"head_dim": null}), &["head_dim is missing"]),
        ("minimax_m2", json!({"attn_type_list": 1}), &["attn_type_list is 1", "a list"]),
    ] {
        says(&refusal(family, &changes), parts);
    }
}

#[test]
fn what_would_change_results_and_is_not_built_is_named() {
    let not_glm = ["qwen3_moe", "mixtral", "minimax_m2"];
    let softmax = ["qwen3_moe", "mixtral"];
    let minimax = ["minimax_m2"];
    for (families, key, bad) in [
        (&MOE_FAMILIES[..], "mlp_bias", json!(true)),
        (&MOE_FAMILIES, "moe_layer_freq", json!([0, 1])),
        (&MOE_FAMILIES, "shared_expert_intermediate_size", json!(64)),
        (&softmax, "scoring_func", json!("sigmoid")),
        (&["glm4_moe", "minimax_m2"], "scoring_func", json!("softmax")),
        (&softmax, "use_routing_bias", json!(true)),
        (&["glm4_moe"], "topk_method", json!("greedy")),
        (&["mixtral", "minimax_m2"], "attention_bias", json!(true)),
        (&["mixtral", "minimax_m2"], "norm_topk_prob", json!(false)),
        (&not_glm, "routed_scaling_factor", json!(2.5)),
        (&not_glm, "n_group", json!(4)),
        (&not_glm, "n_shared_experts", json!(1)),
        (&not_glm, "first_k_dense_replace", json!(1)),
        (&minimax, "use_qk_norm", json!(false)),
        (&minimax, "qk_norm_type", json!("per_head")),
        (&minimax, "shared_intermediate_size", json!(32)),
        (&minimax, "postnorm", json!(true)),
        (&minimax, "attention_output_gate", json!(true)),
        (&minimax, "use_gemma_norm", json!(true)),
        (&minimax, "layernorm_full_attention_alpha", json!(3.5)),
        (&minimax, "layernorm_full_attention_beta", json!(0.5)),
        (&minimax, "layernorm_linear_attention_alpha", json!(3.5)),
        (&minimax, "layernorm_linear_attention_beta", json!(0.5)),
        (&minimax, "layernorm_mlp_alpha", json!(3.5)),
        (&minimax, "layernorm_mlp_beta", json!(0.5)),
        (&minimax, "attn_type_list", json!([1, 0])),
    ] {
        for family in families {
            says(&refusal(family, &json!({key: bad})), &[key, "not supported"]);
        }
    }
    for family in ["mixtral", "minimax_m2"] {
        says(&refusal(family, &json!({"sliding_window": 128})), &["window of 128", "full attention"]);
        parsed(family, &json!({"sliding_window": 512}));
    }
    let window = json!({"use_sliding_window": true, "sliding_window": 128});
    says(&refusal("qwen3_moe", &window), &["window of 128", "full attention"]);
    // Elsewhere that name is a model with linear attention.
    let other = json!({"architectures": null, "model_type": "minimax"});
    says(&refusal("minimax_m2", &other), &["model_type \"minimax\"", "minimax_m2"]);
    let quantised = json!({"quantization_config": {"quant_method": "mxfp4"}});
    for family in MOE_FAMILIES {
        says(&refusal(family, &quantised), &["quantization_config (mxfp4)"]);
        assert!(moe_config(family).is_object());
    }
}

const QWEN3_30B_A3B: &str = r#"{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
  "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"#;

const MIXTRAL_8X7B: &str = r#"{
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000
}"#;

const GLM_4_5: &str = r#"{
  "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
  "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 5120, "partial_rotary_factor": 0.5,
  "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 131072,
  "model_type": "glm4_moe", "moe_intermediate_size": 1536, "norm_topk_prob": true,
  "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 160,
  "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
  "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8,
  "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 1000000, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.54.0", "use_cache": true, "use_qk_norm": true, "vocab_size": 151552
}"#;

/// Without its quantization_config (FP8 in blocks).
const MINIMAX_M2: &str = r#"{
  "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0,
  "attn_type_list": [1, 1, 1, 1, 1, 1, 1, 1], "bos_token_id": null, "eos_token_id": null,
  "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
  "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
  "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
  "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
  "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
  "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
  "num_mtp_modules": 3, "output_router_logits": false, "qk_norm_type": "per_layer",
  "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
  "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
  "shared_moe_mode": "sigmoid", "sliding_window": null, "tie_word_embeddings": false,
  "transformers_version": "4.46.1", "use_cache": true, "use_mtp": true, "use_qk_norm": true,
  "use_routing_bias": true, "vocab_size": 200064
}"#;
