//! config.json: both spellings, defaults, and what is refused.

use crate::common::{config, config_with, refused, says};
use atom_weights::{Architecture, Checkpoint, ModelConfig, QkNorm, Rope, RopeLayout, RopeScaling};
use serde_json::{Value, json};

fn parsed(config: &Value) -> ModelConfig {
    crate::common::synthetic(config).config().clone()
}

/// The message for a configuration with some keys changed.
fn refusal(family: &str, changes: &Value) -> String {
    refused(Checkpoint::synthetic(&config_with(family, changes).to_string(), 0))
}

#[test]
fn every_number_is_read() {
    let changes = json!({"eos_token_id": [5, 6], "mlp_bias": true, "attention_bias": true});
    let expected = ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 96,
        hidden_size: 64,
        intermediate_size: 96,
        layers: 2,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 32,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, dim: 32, layout: RopeLayout::Halves, scaling: RopeScaling::None },
        tied_embeddings: false,
        attention_bias: true,
        mlp_bias: true,
        qk_norm: QkNorm::None,
        moe: None,
        fp8: None,
        max_position: 512,
        bos: Some(1),
        eos: vec![5, 6],
    };
    assert_eq!(parsed(&config_with("llama", &changes)), expected);
    assert!(expected.output_bias());
}

#[test]
fn families_differ_in_biases_and_norms() {
    let names =
        |config: &Value| crate::common::synthetic(config).names().map(str::to_owned).collect::<Vec<_>>();
    let has = |names: &[String], ending: &str| names.iter().any(|name| name.ends_with(ending));

    let llama = names(&config("llama"));
    assert_eq!(llama.len(), 3 + 2 * 9);
    assert!(!llama.iter().any(|name| name.ends_with("bias")));

    let qwen2 = names(&config("qwen2"));
    assert_eq!(qwen2.len(), 3 + 2 * 12);
    assert!(has(&qwen2, "1.self_attn.v_proj.bias") && !has(&qwen2, "o_proj.bias"));

    let qwen3 = names(&config("qwen3"));
    assert_eq!(qwen3.len(), 3 + 2 * 11);
    assert!(has(&qwen3, "0.self_attn.q_norm.weight") && has(&qwen3, "1.self_attn.k_norm.weight"));

    let biased = names(&config_with("llama", &json!({"attention_bias": true, "mlp_bias": true})));
    assert_eq!(biased.len(), 3 + 2 * (9 + 7));
    assert!(has(&biased, "o_proj.bias") && has(&biased, "down_proj.bias"));

    let tied = names(&config_with("llama", &json!({"tie_word_embeddings": true})));
    assert!(!has(&tied, "lm_head.weight"));
}

#[test]
fn absent_keys_mean_what_the_format_says() {
    let mut small = config("llama");
    for key in
        ["architectures", "head_dim", "num_key_value_heads", "rope_theta", "hidden_act", "bos_token_id"]
    {
        small.as_object_mut().unwrap().remove(key);
    }
    small["eos_token_id"] = Value::Null;
    let config = parsed(&small);
    assert_eq!((config.head_dim, config.kv_heads, config.rope.theta), (16, 4, 10_000.0));
    assert_eq!((config.bos, config.eos), (None, vec![]));
    // A null is an absence.
    assert_eq!(parsed(&config_with("llama", &json!({"head_dim": null, "rope_scaling": null}))).head_dim, 16);

    for key in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        says(&refusal("llama", &json!({key: null})), &[key, "is missing"]);
    }
    says(&refusal("qwen3", &json!({"head_dim": null})), &["head_dim is missing"]);
    says(&refusal("qwen2", &json!({"rope_theta": null})), &["rope_theta is missing"]);
}

#[test]
fn both_spellings_of_the_rotary_parameters_are_one() {
    let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let with = |base: &Value, more: Value| {
        let mut object = base.clone();
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        object
    };
    let ramp =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 64.0 };
    for (changes, theta, scaling) in [
        (
            json!({"rope_theta": 5e5, "rope_scaling": with(&llama3, json!({"rope_type": "llama3"}))}),
            5e5,
            ramp.clone(),
        ),
        (
            json!({"rope_theta": null, "rope_parameters": with(&llama3, json!({"rope_type": "llama3", "rope_theta": 5e5}))}),
            5e5,
            ramp.clone(),
        ),
        (
            json!({"rope_theta": 5e5, "rope_parameters": with(&llama3, json!({"rope_type": "llama3", "type": "llama3"}))}),
            5e5,
            ramp,
        ),
        (json!({"rope_scaling": {"type": "linear", "factor": 2}}), 1e4, RopeScaling::Linear { factor: 2.0 }),
        (
            json!({"rope_theta": null, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
            1e6,
            RopeScaling::None,
        ),
        (json!({"rope_theta": null, "rope_parameters": {"rope_theta": 1e6}}), 1e6, RopeScaling::None),
    ] {
        let rope = parsed(&config_with("llama", &changes)).rope;
        assert_eq!((rope.theta, rope.scaling), (theta, scaling), "{changes}");
    }
    for changes in
        [json!({"partial_rotary_factor": 0.5}), json!({"rope_parameters": {"partial_rotary_factor": 0.5}})]
    {
        assert_eq!(parsed(&config_with("llama", &changes)).rope.dim, 16);
    }
}

#[test]
fn rotary_parameters_that_are_not_built_or_contradict_are_named() {
    for kind in ["yarn", "dynamic", "longrope", "mrope"] {
        let error = refusal("llama", &json!({"rope_scaling": {"rope_type": kind, "factor": 4.0}}));
        says(&error, &["rope type", kind, "default, linear and llama3"]);
    }
    let llama3 = |low: f64, high: f64, original: Value| {
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original}})
    };
    for (changes, parts) in [
        (llama3(4.0, 4.0, json!(64)), &["rope_scaling.high_freq_factor is 4", "low_freq_factor = 4"][..]),
        (llama3(0.0, 4.0, json!(64)), &["rope_scaling.low_freq_factor is 0"]),
        (llama3(1.0, 4.0, Value::Null), &["original_max_position_embeddings is missing"]),
        (json!({"rope_scaling": {"type": "linear"}}), &["rope_scaling.factor is missing"]),
        (json!({"rope_scaling": {"type": "linear", "factor": 0.5}}), &["rope_scaling.factor is 0.5"]),
        (json!({"rope_scaling": {"type": "linear", "factor": "2"}}), &["rope_scaling.factor is \"2\""]),
        (json!({"rope_scaling": {"factor": 2}}), &["rope_scaling.rope_type is missing"]),
        (
            json!({"rope_scaling": {"type": "linear", "rope_type": "default"}}),
            &["is default", "type is linear"],
        ),
        (json!({"rope_scaling": 2}), &["rope_scaling is 2"]),
        (json!({"rope_theta": 0}), &["rope_theta is 0"]),
        (json!({"rope_theta": -1e4}), &["rope_theta is -10000"]),
        (
            json!({"rope_parameters": {"rope_theta": 1e6}}),
            &["rope_theta is 10000", "rope_parameters.rope_theta is 1000000"],
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}),
            &["rope_scaling contradicts rope_parameters"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            &["per kind of layer", "full_attention"],
        ),
        (json!({"partial_rotary_factor": 1.5}), &["partial_rotary_factor is 1.5"]),
        (
            json!({"partial_rotary_factor": 0.1}),
            &["partial_rotary_factor makes 3 rotated elements of a head's 32"],
        ),
    ] {
        says(&refusal("llama", &changes), parts);
    }
}

#[test]
fn numbers_that_no_model_has_are_named_with_their_key() {
    for key in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ] {
        for bad in
            [json!(0), json!(-8), json!(1.5), json!("64"), json!(1_u64 << 40), json!(u64::MAX), json!([64])]
        {
            says(
                &refusal("llama", &json!({key: bad})),
                &[&format!("{key} is {bad}"), "a whole number from 1 to"],
            );
        }
    }
    for bad in [json!(0.0), json!(-1e-5), json!(1.0), json!("small")] {
        says(&refusal("llama", &json!({"rms_norm_eps": bad})), &[&format!("rms_norm_eps is {bad}")]);
    }
    for (changes, parts) in [
        (
            json!({"num_attention_heads": 9, "num_key_value_heads": 2}),
            &["num_key_value_heads is 2", "num_attention_heads = 9"][..],
        ),
        (json!({"num_key_value_heads": 8}), &["num_key_value_heads is 8", "num_attention_heads = 4"]),
        (json!({"head_dim": 33}), &["head_dim is 33", "even"]),
        (json!({"num_attention_heads": 16384, "head_dim": 128}), &["head_dim is 128", "16384 heads"]),
        (
            json!({"head_dim": null, "num_attention_heads": 6}),
            &["num_attention_heads is 6", "hidden_size = 64"],
        ),
        (json!({"eos_token_id": -1}), &["eos_token_id is -1"]),
        (json!({"eos_token_id": [2, "x"]}), &["eos_token_id is \"x\""]),
        (json!({"eos_token_id": 96}), &["eos_token_id is 96", "96 entries"]),
        (json!({"bos_token_id": 4_294_967_296_u64}), &["bos_token_id is 4294967296"]),
        (json!({"tie_word_embeddings": "yes"}), &["tie_word_embeddings is \"yes\"", "true or false"]),
    ] {
        says(&refusal("llama", &changes), parts);
    }
}

#[test]
fn models_that_are_not_built_are_named_with_what_is() {
    for (changes, parts) in [
        (
            json!({"architectures": ["GemmaForCausalLM"]}),
            &["GemmaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"][..],
        ),
        (
            json!({"architectures": null, "model_type": "gpt_oss"}),
            &["model_type \"gpt_oss\"", "llama, qwen2, qwen3"],
        ),
        (
            json!({"architectures": null, "model_type": null}),
            &["model_type is missing", "llama, qwen2, qwen3"],
        ),
        (json!({"architectures": ["Qwen2ForCausalLM"]}), &["model_type is llama", "Qwen2ForCausalLM"]),
        (json!({"architectures": ["LlamaForCausalLM", "X"]}), &["architectures lists 2 classes"]),
        (json!({"architectures": "LlamaForCausalLM"}), &["architectures is", "a list"]),
        (json!({"model_type": 3}), &["model_type 3"]),
        (json!({"hidden_act": "gelu"}), &["hidden_act \"gelu\"", "silu"]),
        (
            json!({"quantization_config": {"quant_method": "awq"}}),
            &["quantization_config (awq)", "unquantised", "fbgemm_fp8"],
        ),
        (json!({"rope_interleaved": true}), &["rope_interleaved true"]),
    ] {
        says(&refusal("llama", &changes), parts);
    }
}

#[test]
fn windows_are_refused_only_where_they_act() {
    let full = json!(["full_attention", "full_attention"]);
    let mixed = json!(["full_attention", "sliding_attention"]);
    for changes in [
        json!({"use_sliding_window": false, "sliding_window": 128, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 512}),
        json!({"use_sliding_window": true, "sliding_window": 128, "max_window_layers": 2}),
        json!({"use_sliding_window": false, "sliding_window": null, "layer_types": full}),
        json!({"sliding_window": 512, "layer_types": mixed}),
    ] {
        parsed(&config_with("qwen2", &changes));
    }
    for (changes, parts) in [
        (
            json!({"use_sliding_window": true, "sliding_window": 128}),
            ["window of 128", "max_position_embeddings = 512"],
        ),
        (
            json!({"use_sliding_window": true, "sliding_window": 128, "max_window_layers": 1}),
            ["window of 128", "full"],
        ),
        (json!({"use_sliding_window": true}), ["sliding_window", "is missing"]),
        (json!({"sliding_window": 128, "layer_types": mixed}), ["window of 128", "full attention"]),
        (
            json!({"layer_types": ["linear_attention", "full_attention"]}),
            ["linear_attention", "full_attention"],
        ),
        (json!({"layer_types": ["full_attention"]}), ["layer_types has 1", "2 layers"]),
        (json!({"layer_types": "full_attention"}), ["layer_types", "not a list"]),
    ] {
        says(&refusal("qwen2", &changes), &parts);
    }
}
