//! Models in GGUF files: names, configuration, the order of q's and k's rows, and what is refused.

use crate::common::{config, config_with, refused, says, synthetic};
use atom_weights::gguf::{Gguf, write, write::GgufWriter};
use atom_weights::{Checkpoint, DType, RopeLayout, RopeScaling, WeightsError, dequantize};
use serde_json::json;
use std::path::Path;

fn open(writer: &GgufWriter) -> Result<Checkpoint, WeightsError> {
    Checkpoint::from_gguf(Gguf::from_bytes(writer.finish(), Path::new("model.gguf"))?)
}

/// Keys of a llama with one layer, without tensors. `but` is left out, `more` added.
fn keys(but: &str, more: impl FnOnce(&mut GgufWriter)) -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer.string("general.architecture", "llama");
    for (key, value) in [
        ("llama.block_count", 1),
        ("llama.context_length", 128),
        ("llama.embedding_length", 32),
        ("llama.feed_forward_length", 64),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
        ("tokenizer.ggml.eos_token_id", 2),
    ] {
        if key != but {
            writer.u32(key, value);
        }
    }
    if but != "llama.attention.layer_norm_rms_epsilon" {
        writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    }
    more(&mut writer);
    writer
}

/// The tensors that go with [`keys`]. `but` is left out.
fn tensors(writer: &mut GgufWriter, but: &str) {
    for (name, shape) in [
        ("token_embd.weight", &[40, 32][..]),
        ("output_norm.weight", &[32]),
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.attn_q.weight", &[32, 32]),
        ("blk.0.attn_k.weight", &[16, 32]),
        ("blk.0.attn_v.weight", &[16, 32]),
        ("blk.0.attn_output.weight", &[32, 32]),
        ("blk.0.ffn_gate.weight", &[64, 32]),
        ("blk.0.ffn_up.weight", &[64, 32]),
        ("blk.0.ffn_down.weight", &[32, 64]),
    ] {
        if name != but {
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            writer.tensor(name, DType::F32, shape, &bytes);
        }
    }
}

fn whole(but: &str, more: impl FnOnce(&mut GgufWriter)) -> GgufWriter {
    let mut writer = keys(but, more);
    tensors(&mut writer, but);
    writer
}

#[test]
fn a_written_model_is_the_model() {
    for family in ["llama", "qwen2", "qwen3"] {
        let model = synthetic(&config_with(family, &json!({"eos_token_id": [2, 5]})));
        let opened = open(&write::from_checkpoint(&model, DType::F32).unwrap()).unwrap();
        let (mut found, expected) = (opened.config().clone(), model.config());
        if family == "llama" {
            assert_eq!(found.rope.layout, RopeLayout::Pairs);
            found.rope.layout = RopeLayout::Halves;
        }
        assert_eq!(&found, expected);
        assert!(opened.names().eq(model.names()) && opened.unused().is_empty());
        assert_eq!(opened.parameters(), model.parameters());
        for name in model.names() {
            let permuted = family == "llama" && (name.contains("q_proj") || name.contains("k_proj"));
            let (found, expected) = (opened.tensor(name).unwrap(), model.tensor(name).unwrap());
            assert_eq!(found.shape, expected.shape);
            assert_eq!(dequantize(&found) == dequantize(&expected), !permuted, "{name}");
        }
    }
}

/// Rotating pairs of the reordered rows is rotating halves of the original ones: row `j` of the first
/// half becomes row `2j`, its partner `2j + 1`.
#[test]
fn q_and_k_of_a_llama_are_reordered_head_by_head() {
    let changes = json!({"partial_rotary_factor": 0.5, "attention_bias": true});
    let model = synthetic(&config_with("llama", &changes));
    let opened = open(&write::from_checkpoint(&model, DType::F32).unwrap()).unwrap();
    let rotated = 16;
    for (name, heads) in [("q_proj.weight", 4), ("k_proj.weight", 2), ("q_proj.bias", 4)] {
        let name = format!("model.layers.1.self_attn.{name}");
        let (pairs, halves) = (opened.tensor(&name).unwrap(), model.tensor(&name).unwrap());
        let cols = if name.ends_with("bias") { 1 } else { 64 };
        let (pairs, halves) = (dequantize(&pairs), dequantize(&halves));
        let row = |values: &[f32], row: usize| values[row * cols..(row + 1) * cols].to_vec();
        for head in 0..heads {
            for j in 0..rotated / 2 {
                assert_eq!(row(&pairs, head * 32 + 2 * j), row(&halves, head * 32 + j));
                assert_eq!(row(&pairs, head * 32 + 2 * j + 1), row(&halves, head * 32 + j + rotated / 2));
            }
            for j in rotated..32 {
                assert_eq!(row(&pairs, head * 32 + j), row(&halves, head * 32 + j));
            }
        }
    }
}

#[test]
fn quantised_matrices_stay_as_they_are_and_vectors_are_f32() {
    let model = synthetic(&config_with("qwen2", &json!({"tie_word_embeddings": true})));
    for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1] {
        let opened = open(&write::from_checkpoint(&model, dtype).unwrap()).unwrap();
        assert!(opened.config().tied_embeddings);
        assert!(opened.description().ends_with(&format!("{dtype:?}")), "{}", opened.description());
        let up = opened.tensor("model.layers.0.mlp.up_proj.weight").unwrap();
        assert_eq!((up.dtype, up.bytes().len()), (dtype, 96 * dtype.row_bytes(64)));
        assert_eq!(opened.tensor("model.layers.0.self_attn.q_proj.bias").unwrap().dtype, DType::F32);
    }
    let wide =
        json!({"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32});
    let model = synthetic(&config_with("llama", &wide));
    for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
        let opened = open(&write::from_checkpoint(&model, dtype).unwrap()).unwrap();
        assert!(opened.description().ends_with(&format!("{dtype:?}")), "{}", opened.description());
        let down = opened.tensor("model.layers.0.mlp.down_proj.weight").unwrap();
        assert_eq!((down.dtype, down.bytes().len()), (dtype, 256 * dtype.row_bytes(512)));
    }
    let narrow = synthetic(&config_with("llama", &json!({"hidden_size": 48})));
    let error = write::from_checkpoint(&narrow, DType::Q8_0).unwrap_err().to_string();
    says(&error, &["model.embed_tokens.weight of 48 columns as Q8_0", "multiples of 32"]);
}

#[test]
fn scalings_survive_as_what_they_do_to_frequencies() {
    let scalings = [
        json!({"rope_type": "linear", "factor": 4.0}),
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}),
    ];
    for scaling in scalings {
        let model = synthetic(&config_with("llama", &json!({"rope_scaling": scaling})));
        let opened = open(&write::from_checkpoint(&model, DType::F32).unwrap()).unwrap();
        assert!(!opened.contains("rope_freqs.weight"), "it is part of the configuration");
        let found = opened.config().rope.inverse_frequencies();
        for (a, b) in found.iter().zip(model.config().rope.inverse_frequencies()) {
            assert!((a - b).abs() <= b * 1e-6, "{a} instead of {b}");
        }
    }
}

#[test]
fn defaults_are_those_of_the_format() {
    let model = open(&whole("llama.attention.head_count_kv", |_| {})).map(|_| ());
    // Without it there are as many as query heads, which the tensors of k contradict.
    says(&model.unwrap_err().to_string(), &["k_proj.weight", "[16, 32]", "[32, 32]"]);
    let model = open(&whole("", |w| {
        w.u32("tokenizer.ggml.eot_token_id", 7).u32("tokenizer.ggml.bos_token_id", 1);
    }))
    .unwrap();
    let config = model.config();
    assert_eq!((config.head_dim, config.rope.theta, config.rope.dim), (8, 10_000.0, 8));
    assert_eq!((config.vocab_size, config.tied_embeddings), (40, true));
    assert_eq!((config.bos, config.eos.as_slice()), (Some(1), &[2, 7][..]));
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert_eq!(model.gguf().unwrap().string("general.architecture").unwrap(), Some("llama"));
    assert!(model.raw_config().is_none() && model.folder().is_none());
}

#[test]
fn linear_scaling_has_three_spellings() {
    for (factor, more) in [
        (
            2.0,
            &(|w: &mut GgufWriter| {
                w.string("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2.0);
            }) as &dyn Fn(&mut GgufWriter),
        ),
        (2.0, &|w| {
            w.f32("llama.rope.scaling.factor", 2.0);
        }),
        (4.0, &|w| {
            w.f32("llama.rope.scale_linear", 4.0);
        }),
    ] {
        let model = open(&whole("", |w| more(w))).unwrap();
        assert_eq!(model.config().rope.scaling, RopeScaling::Linear { factor });
    }
    let off = open(&whole("", |w| {
        w.string("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 2.0);
    }));
    assert_eq!(off.unwrap().config().rope.scaling, RopeScaling::None);
}

#[test]
fn keys_that_are_missing_or_impossible_are_named() {
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        says(&refused(open(&whole(key, |_| {}))), &["model.gguf", key, "is missing"]);
        if !key.ends_with("epsilon") {
            for bad in [0, u32::MAX] {
                let error = refused(open(&whole(key, |w| {
                    w.u32(key, bad);
                })));
                says(&error, &[&format!("{key} is {bad}"), "1 to"]);
            }
            let error = refused(open(&whole(key, |w| {
                w.i32s(key, &[4, 4]);
            })));
            says(&error, &[key, "an array of 2 elements"]);
        }
    }
    type More = fn(&mut GgufWriter) -> &mut GgufWriter;
    let cases: [(&str, More, &[&str]); 12] = [
        (
            "llama.attention.head_count_kv",
            |w| w.u32("llama.attention.head_count_kv", 3),
            &["head_count_kv is 3", "head_count = 4"],
        ),
        (
            "llama.attention.head_count",
            |w| w.u32("llama.attention.head_count", 5),
            &["head_count is 5", "embedding_length = 32"],
        ),
        ("", |w| w.u32("llama.attention.key_length", 7), &["key_length is 7", "even"]),
        (
            "",
            |w| w.u32("llama.attention.key_length", 8).u32("llama.attention.value_length", 16),
            &["value_length is 16", "key_length is 8"],
        ),
        ("", |w| w.u32("llama.rope.dimension_count", 10), &["rope.dimension_count makes 10", "head's 8"]),
        ("", |w| w.f32("llama.rope.freq_base", -1.0), &["rope.freq_base is -1"]),
        ("", |w| w.f32("llama.rope.freq_base", f32::NAN), &["rope.freq_base is NaN"]),
        ("", |w| w.f32("llama.rope.scaling.factor", f32::INFINITY), &["scaling.factor is inf"]),
        ("", |w| w.f32("llama.rope.scaling.factor", 0.5), &["scaling.factor is 0.5"]),
        ("", |w| w.u32("tokenizer.ggml.bos_token_id", 40), &["bos_token_id is 40", "40 entries"]),
        (
            "tokenizer.ggml.eos_token_id",
            |w| w.u32("tokenizer.ggml.eos_token_id", u32::MAX),
            &["eos_token_id is 4294967295"],
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            |w| w.f32("llama.attention.layer_norm_rms_epsilon", 0.0),
            &["rms_epsilon is 0"],
        ),
    ];
    for (but, more, parts) in cases {
        let error = refused(open(&whole(but, |w| {
            more(w);
        })));
        says(&error, parts);
    }
}

#[test]
fn what_is_not_built_is_named() {
    type More = fn(&mut GgufWriter) -> &mut GgufWriter;
    let cases: [(More, &[&str]); 8] = [
        (|w| w.string("llama.rope.scaling.type", "yarn"), &["rope.scaling.type \"yarn\"", "linear"]),
        (|w| w.u32("llama.expert_count", 8), &["llama.expert_used_count is missing"]),
        (|w| w.bool("llama.attention.causal", false), &["llama.attention.causal"]),
        (|w| w.u32("llama.attention.sliding_window", 64), &["sliding_window = 64", "context_length = 128"]),
        (|w| w.f32("llama.attention.scale", 0.1), &["llama.attention.scale = 0.1"]),
        (|w| w.f32("llama.logit_scale", 8.0), &["llama.logit_scale = 8"]),
        (|w| w.value("split.count", 2, &[3, 0]), &["split.count", "merge"]),
        (|w| w.u32("split.count", 1).string("llama.rope.scaling.type", "longrope"), &["longrope"]),
    ];
    for (more, parts) in cases {
        let error = refused(open(&whole("", |w| {
            more(w);
        })));
        says(&error, parts);
    }
    let architecture = |name: &str| refused(open(GgufWriter::new().string("general.architecture", name)));
    says(&architecture("gemma3"), &["general.architecture \"gemma3\"", "llama, qwen2, qwen3"]);
    says(&refused(open(GgufWriter::new().u32("k", 1))), &["general.architecture is missing"]);
    // A window as long as the context is none.
    open(&whole("", |w| {
        w.u32("llama.attention.sliding_window", 128);
    }))
    .unwrap();
}

#[test]
fn tensors_must_cover_the_model_and_extra_ones_are_listed() {
    says(&refused(open(&whole("token_embd.weight", |_| {}))), &["no token_embd.weight"]);
    says(
        &refused(open(&whole("blk.0.ffn_down.weight", |_| {}))),
        &["tensor model.layers.0.mlp.down_proj.weight of shape [32, 64] is missing"],
    );
    let mut writer = whole("", |_| {});
    writer.tensor("blk.0.extra.weight", DType::F32, &[1], &[0; 4]);
    // A type that can't be read, of no use here.
    writer.tensor_of_type("blk.1.attn_q.weight", 10, &[256], &[0; 84]);
    let model = open(&writer).unwrap();
    assert_eq!(model.unused(), ["blk.0.extra.weight", "model.layers.1.self_attn.q_proj.weight"]);
    let error = model.tensor("model.layers.1.self_attn.q_proj.weight").unwrap_err().to_string();
    says(&error, &["q_proj.weight is stored as Q2_K", "Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1 and Q4_0"]);

    for (type_number, name) in [(11, "Q3_K"), (23, "IQ4_XS"), (39, "MXFP4"), (777, "type 777")] {
        let mut writer = whole("blk.0.ffn_up.weight", |_| {});
        writer.tensor_of_type("blk.0.ffn_up.weight", type_number, &[32, 64], &[0; 64]);
        says(&refused(open(&writer)), &["model.layers.0.mlp.up_proj.weight is stored as", name, "Q4_1"]);
    }
    let mut writer = whole("", |_| {});
    writer.tensor("model.norm.weight", DType::F32, &[32], &[0; 128]);
    says(&refused(open(&writer)), &["tensor model.norm.weight appears twice"]);
    // One bias of a layer calls for the others.
    let mut writer = whole("", |_| {});
    writer.tensor("blk.0.attn_output.bias", DType::F32, &[32], &[0; 128]);
    says(&refused(open(&writer)), &["self_attn.q_proj.bias of shape [32] is missing"]);
}

#[test]
fn stored_divisors_must_be_as_many_as_pairs_and_above_zero() {
    let with = |divisors: &[f32], more: fn(&mut GgufWriter)| {
        let mut writer = whole("", more);
        let bytes: Vec<u8> = divisors.iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.tensor("rope_freqs.weight", DType::F32, &[divisors.len()], &bytes);
        open(&writer)
    };
    let model = with(&[1.0, 1.0, 2.0, 8.0], |_| {}).unwrap();
    assert_eq!(model.config().rope.scaling, RopeScaling::Divisors(vec![1.0, 1.0, 2.0, 8.0]));
    says(&refused(with(&[1.0; 8], |_| {})), &["rope_freqs.weight has 8 elements; 4"]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        says(&refused(with(&[1.0, bad, 1.0, 1.0], |_| {})), &[&format!("a divisor of {bad}")]);
    }
    let both = with(&[1.0; 4], |w| {
        w.f32("llama.rope.scaling.factor", 2.0);
    });
    says(&refused(both), &["rope.scaling.factor", "rope_freqs.weight"]);
    let mut writer = whole("", |_| {});
    writer.tensor_of_type("rope_freqs.weight", 10, &[256], &[0; 84]);
    says(&refused(open(&writer)), &["rope_freqs.weight is stored as Q2_K"]);
}

#[test]
fn more_end_tokens_than_gguf_has_keys_for_are_refused() {
    let model = synthetic(&config_with("llama", &json!({"eos_token_id": [1, 2, 3, 4]})));
    says(
        &write::from_checkpoint(&model, DType::F32).unwrap_err().to_string(),
        &["4 end tokens", "at most 3"],
    );
    assert_eq!(synthetic(&config("llama")).config().eos, [2]);
}
