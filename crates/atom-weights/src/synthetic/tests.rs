use super::*;
use crate::Checkpoint;
use crate::quant::dequantize;

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

#[test]
fn a_model_that_no_memory_holds_is_refused_with_its_size() {
    let config = config(false, false).replace("\"hidden_size\": 64", "\"hidden_size\": 524288");
    let config = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4000");
    let error = Checkpoint::synthetic(&config, 0).unwrap_err().to_string();
    assert!(error.contains("17179869184") && error.contains("num_hidden_layers"), "{error}");
}
