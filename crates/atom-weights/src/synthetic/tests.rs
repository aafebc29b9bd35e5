use super::*;
use crate::Checkpoint;
use crate::quant::dequantize;
use serde_json::Value;
use std::path::Path;

fn config(tied: bool, bias: bool) -> String {
    format!(
        r#"{{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
            "tie_word_embeddings": {tied}, "attention_bias": {bias}}}"#
    )
}

#[test]
fn the_checksum_is_zlibs() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    assert_eq!(crc32(b""), 0);
}

/// Values that the documented rule gives in another language.
#[test]
fn elements_are_those_of_the_documented_rule() {
    let untied = |salt| Checkpoint::synthetic(&config(false, true), salt).unwrap();
    let tied = |salt| Checkpoint::synthetic(&config(true, true), salt).unwrap();
    let check = |model: Checkpoint, name: &str, expected: &[(usize, f64)]| {
        let values = dequantize(&model.tensor(name).unwrap());
        for &(index, value) in expected {
            let found = f64::from(values[index]);
            assert!(
                (found - value).abs() <= value.abs() * 1e-6,
                "{name}[{index}]: {found} instead of {value}"
            );
        }
    };
    check(untied(0), "model.embed_tokens.weight", &[(0, -0.7491813), (1, 0.6468489), (1001, 0.7292827)]);
    check(tied(5), "model.embed_tokens.weight", &[(0, -0.09575851), (2, -0.3244561), (1001, 0.26893827)]);
    check(
        untied(5),
        "model.layers.1.self_attn.q_proj.weight",
        &[(0, 0.17635579), (1, 0.05637382), (4095, -0.16853596)],
    );
    check(
        untied(5),
        "model.layers.1.self_attn.o_proj.weight",
        &[(0, 0.10582047), (1, 0.32735878), (4095, 0.12006027)],
    );
    check(untied(5), "model.layers.1.mlp.down_proj.weight", &[(0, -0.060524251), (4095, -0.11875299)]);
    check(untied(5), "model.layers.0.input_layernorm.weight", &[(0, 0.94508505), (63, 0.92036974)]);
    check(untied(5), "model.layers.0.self_attn.k_proj.bias", &[(0, -0.015825327), (31, -0.062745862)]);
    let salt = 12_345_678_901_234_567_890;
    check(untied(salt), "lm_head.weight", &[(0, 0.089144714), (1, 0.42187098), (32767, -0.056605168)]);
}

/// Rows of 64 are no super-blocks, rows of 256 are; rows of 40 are no blocks at all.
#[test]
fn rows_that_are_no_super_blocks_have_the_type_that_converters_choose() {
    let wide = config(false, false).replace(r#""intermediate_size": 160"#, r#""intermediate_size": 256"#);
    let narrow = wide.replace(r#""hidden_size": 64"#, r#""hidden_size": 40"#);
    let types = |config: &str, dtype| {
        let config =
            crate::config::from_json(Path::new("config.json"), &serde_json::from_str(config).unwrap());
        let made = tensors(&config.unwrap(), Rule::Dummy, dtype).unwrap();
        let of = |name: &str| made.iter().find(|(known, _)| known.ends_with(name)).unwrap().1.dtype;
        [of("up_proj.weight"), of("down_proj.weight"), of("0.input_layernorm.weight")]
    };
    for (dtype, other) in [(DType::Q4_K, DType::Q5_0), (DType::Q5_K, DType::Q5_1), (DType::Q6_K, DType::Q8_0)]
    {
        assert_eq!(types(&wide, dtype), [other, dtype, DType::F32]);
        assert_eq!(types(&narrow, dtype), [DType::F32, dtype, DType::F32]);
    }
}

/// The names of a model with experts, and the gain of its router.
#[test]
fn elements_of_experts_are_those_of_the_documented_rule() {
    let config = r#"{"model_type": "glm4_moe", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 128}"#;
    let model = Checkpoint::synthetic(config, 5).unwrap();
    for (name, expected) in EXPERTS_EXPECTED {
        let values = dequantize(&model.tensor(&format!("model.layers.1.mlp.{name}")).unwrap());
        for &(index, value) in expected {
            let found = f64::from(values[index]);
            assert!(
                (found - value).abs() <= value.abs() * 1e-6,
                "{name}[{index}]: {found} instead of {value}"
            );
        }
    }
}

/// Every tensor of every stored reference, by the checksum of its bytes that the other language computed.
#[test]
fn models_of_the_references_have_the_weights_that_these_were_computed_from() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/golden");
    let mut models = 0;
    for entry in std::fs::read_dir(&golden).unwrap() {
        let folder = entry.unwrap().path();
        let read = |file: &str| std::fs::read_to_string(folder.join(file));
        let (Ok(config), Ok(reference)) = (read("config.json"), read("reference.json")) else { continue };
        let reference: Value = serde_json::from_str(&reference).unwrap();
        // Those of FP8 models are of codes and scales, and compared where these are made.
        if reference.get("scale_name").is_some() {
            continue;
        }
        let model = Checkpoint::synthetic(&config, reference["salt"].as_u64().unwrap()).unwrap();
        let tensors = reference["tensors"].as_object().unwrap();
        assert_eq!(model.names().count(), tensors.len(), "{folder:?}");
        for (name, expected) in tensors {
            let tensor = model.tensor(name).unwrap();
            let shape = serde_json::to_value(&tensor.shape).unwrap();
            assert_eq!(shape, expected["shape"], "{folder:?} {name}");
            assert_eq!(u64::from(crc32(tensor.bytes())), expected["crc32"], "{folder:?} {name}");
        }
        models += 1;
    }
    assert!(models >= MODELS, "{models} of {MODELS} models under {golden:?}");
}

#[test]
fn a_model_that_no_memory_holds_is_refused_with_its_size() {
    let config = config(false, false).replace("\"hidden_size\": 64", "\"hidden_size\": 524288");
    let config = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4000");
    let error = Checkpoint::synthetic(&config, 0).unwrap_err().to_string();
    assert!(error.contains("17179869184") && error.contains("num_hidden_layers"), "{error}");
}

/// Stored references: seven dense families' models and five with experts.
const MODELS: usize = 12;

const EXPERTS_EXPECTED: [(&str, &[(usize, f64)]); 5] = [
    ("gate.weight", &[(0, 0.000881501939), (1, 0.0116663044), (511, -0.228933752)]),
    ("gate.e_score_correction_bias", &[(0, -0.204384834), (7, 0.0131794009)]),
    ("experts.7.up_proj.weight", &[(0, 0.226490796), (2047, -0.286987364)]),
    ("experts.0.down_proj.weight", &[(0, 0.0907597914), (2047, 0.177969426)]),
    ("shared_experts.gate_proj.weight", &[(1, -0.0346993953), (2047, 0.0648298487)]),
];
