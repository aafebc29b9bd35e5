//! Folders as the hub has them: what is found in them, and what is refused.

use crate::common::{
    Folder, config, config_with, raw_safetensors, refused, safetensors_file, says, synthetic,
};
use atom_weights::{Checkpoint, DType, dequantize, gguf::write};
use serde_json::{Value, json};

fn single(name: &str, config: &Value) -> (Folder, Checkpoint) {
    let (folder, model) = (Folder::new(name), synthetic(config));
    folder.write_json("config.json", config);
    folder.write("model.safetensors", safetensors_file(&model, DType::F32, model.names()));
    (folder, model)
}

/// Every other tensor in the second of two shards.
fn sharded(name: &str) -> (Folder, Checkpoint, Value) {
    let config = config("qwen3");
    let (folder, model) = (Folder::new(name), synthetic(&config));
    folder.write_json("config.json", &config);
    let mut weight_map = serde_json::Map::new();
    for (shard, file) in [SHARDS.0, SHARDS.1].into_iter().enumerate() {
        let names: Vec<&str> = model.names().skip(shard).step_by(2).collect();
        folder.write(file, safetensors_file(&model, DType::BF16, names.iter().copied()));
        weight_map.extend(names.iter().map(|name| ((*name).to_owned(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    folder.write_json(INDEX, &index);
    (folder, model, index)
}

#[test]
fn a_single_file_is_read_as_it_was_written() {
    for family in ["llama", "qwen2", "qwen3"] {
        let (folder, model) = single(&format!("single-{family}"), &config(family));
        let opened = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(opened.config(), model.config());
        assert_eq!(opened.folder(), Some(folder.path()));
        assert!(opened.gguf().is_none() && opened.unused().is_empty());
        assert_eq!(opened.raw_config().unwrap()["model_type"], family);
        assert_eq!(opened.parameters(), model.parameters());
        assert_eq!(opened.total_bytes(), 4 * model.parameters());
        assert!(opened.names().eq(model.names()));
        for name in model.names() {
            let (found, expected) = (opened.tensor(name).unwrap(), model.tensor(name).unwrap());
            assert_eq!(
                (&found.shape, dequantize(&found)),
                (&expected.shape, dequantize(&expected)),
                "{name}"
            );
        }
    }
}

#[test]
fn a_tensor_outlives_its_checkpoint() {
    let (folder, model) = single("outlives", &config("llama"));
    let tensor = Checkpoint::open(folder.path()).unwrap().tensor("model.norm.weight").unwrap();
    drop(folder); // The files are gone by name; the mapping holds them.
    assert_eq!(dequantize(&tensor), dequantize(&model.tensor("model.norm.weight").unwrap()));
}

#[test]
fn shards_are_read_through_their_index() {
    let (folder, model, _) = sharded("shards");
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert!(opened.names().eq(model.names()) && opened.unused().is_empty());
    assert_eq!(opened.total_bytes(), 2 * model.parameters());
    assert_eq!(opened.description(), "qwen3, 2 layers, 98752 parameters, BF16");
}

#[test]
fn an_index_that_does_not_match_its_shards_is_refused() {
    let (folder, _, index) = sharded("bad-index");
    let with = |name: &str, shard: Value| {
        let mut index = index.clone();
        index["weight_map"][name] = shard;
        folder.write_json(INDEX, &index);
        folder.refused()
    };
    let norm = "model.norm.weight";
    says(
        &with(norm, json!("../other/model.safetensors")),
        &[norm, "../other/model.safetensors", "beside it"],
    );
    says(&with(norm, json!("/etc/model.safetensors")), &["/etc/model.safetensors"]);
    says(&with(norm, json!("a\\b.safetensors")), &["beside it"]);
    says(&with(norm, json!("..")), &["beside it"]);
    says(&with(norm, json!("config.json")), &["beside it"]);
    says(&with(norm, json!(7)), &["maps model.norm.weight to 7"]);
    says(&with(norm, json!("model-00009.safetensors")), &["model-00009.safetensors", "not there"]);
    says(&with("model.extra", json!(SHARDS.0)), &["maps model.extra to", "no such tensor"]);
    folder.write_json(INDEX, &json!({"weight_map": []}));
    says(&folder.refused(), &["no object \"weight_map\""]);
    folder.write(INDEX, "{");
    says(&folder.refused(), &[INDEX, "not valid JSON"]);

    // A tensor that no line of the index lists is missing, though a shard has it.
    let mut less = index.clone();
    less["weight_map"].as_object_mut().unwrap().remove(norm);
    folder.write_json(INDEX, &less);
    says(&folder.refused(), &["tensor model.norm.weight of shape [64] is missing", "qwen3"]);

    folder.write_json(INDEX, &index);
    folder.remove(SHARDS.1);
    says(&folder.refused(), &[SHARDS.1, "not there"]);
}

#[test]
fn tensors_of_no_use_are_listed_and_not_an_error() {
    let untied = config_with("llama", &json!({"tie_word_embeddings": false}));
    let tied = config_with("llama", &json!({"tie_word_embeddings": true}));
    let (folder, model) = single("unused", &untied);
    folder.write_json("config.json", &tied);
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(opened.unused(), ["lm_head.weight"]);
    assert!(opened.contains("lm_head.weight"));
    assert_eq!(opened.parameters() + 96 * 64, model.parameters());
}

#[test]
fn missing_and_misshapen_tensors_are_named_with_both_shapes() {
    let (folder, model) = single("coverage", &config("llama"));
    let all_but = |left_out: &str| {
        let names = model.names().filter(|name| *name != left_out);
        folder.write("model.safetensors", safetensors_file(&model, DType::F16, names));
        folder.refused()
    };
    for (name, shape) in [
        ("lm_head.weight", "[96, 64]"),
        ("model.layers.1.mlp.down_proj.weight", "[64, 96]"),
        ("model.layers.0.self_attn.k_proj.weight", "[64, 64]"),
        ("model.layers.0.post_attention_layernorm.weight", "[64]"),
    ] {
        says(&all_but(name), &[name, shape, "is missing", "llama"]);
    }
    folder.write("model.safetensors", safetensors_file(&model, DType::F16, model.names()));
    for (changes, parts) in [
        (json!({"vocab_size": 97}), ["embed_tokens.weight", "[96, 64]", "[97, 64]"]),
        (json!({"num_key_value_heads": 4}), ["k_proj.weight", "[64, 64]", "[128, 64]"]),
        (json!({"num_hidden_layers": 3}), ["model.layers.2.input_layernorm.weight", "[64]", "missing"]),
        (json!({"attention_bias": true}), ["q_proj.bias", "[128]", "missing"]),
        (json!({"mlp_bias": true}), ["gate_proj.bias", "[96]", "missing"]),
    ] {
        folder.write_json("config.json", &config_with("llama", &changes));
        says(&folder.refused(), &parts);
    }
}

#[test]
fn end_tokens_of_both_files_count_once_each() {
    let (folder, _) = single("eos", &config_with("llama", &json!({"eos_token_id": [2, 7]})));
    let eos = || Checkpoint::open(folder.path()).unwrap().config().eos.clone();
    assert_eq!(eos(), [2, 7]);
    folder.write_json("generation_config.json", &json!({"eos_token_id": [7, 9], "bos_token_id": 3}));
    assert_eq!(eos(), [2, 7, 9]);
    folder.write_json("generation_config.json", &json!({"eos_token_id": 11}));
    assert_eq!(eos(), [2, 7, 11]);
    folder.write_json("generation_config.json", &json!({"temperature": 0.6}));
    assert_eq!(eos(), [2, 7]);
    folder.write_json("generation_config.json", &json!({"eos_token_id": 96}));
    says(&folder.refused(), &["generation_config.json", "eos_token_id is 96", "96 entries"]);
    folder.write("generation_config.json", "[");
    says(&folder.refused(), &["generation_config.json", "not valid JSON"]);
}

#[test]
fn folders_without_one_clear_choice_say_what_they_hold() {
    let folder = Folder::new("choice");
    says(&folder.refused(), &["none of its 0 entries", ".gguf"]);
    folder.write("pytorch_model.bin", "");
    says(&folder.refused(), &["PyTorch pickle", "convert"]);

    let model = synthetic(&config("llama"));
    let gguf = write::from_checkpoint(&model, DType::Q8_0).unwrap().finish();
    folder.write("one.gguf", &gguf);
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert!(opened.gguf().is_some() && opened.folder().is_none());
    folder.write("two.gguf", &gguf);
    says(&folder.refused(), &["2 .gguf files", "one.gguf, two.gguf"]);

    let weights = safetensors_file(&model, DType::F32, model.names());
    folder.write("weights.safetensors", &weights);
    says(&folder.refused(), &[".safetensors but no config.json"]);
    folder.write_json("config.json", &config("llama"));
    assert!(Checkpoint::open(folder.path()).unwrap().gguf().is_none());
    folder.write("other.safetensors", &weights);
    says(&folder.refused(), &["2 .safetensors files", "no model.safetensors.index.json"]);
}

#[test]
fn paths_that_are_no_checkpoint_are_refused() {
    let folder = Folder::new("paths");
    says(&refused(Checkpoint::open(folder.path().join("absent.gguf"))), &["can't read", "absent.gguf"]);
    let refused = |name: &str, bytes: &[u8]| refused(Checkpoint::open(folder.write(name, bytes)));
    says(
        &refused("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      "),
        &["does not begin with the letters GGUF"],
    );
    says(&refused("empty.gguf", b""), &["does not begin with the letters GGUF"]);
    folder.write("config.json", "[1]");
    says(&folder.refused(), &["config.json", "JSON object"]);
    folder.write("config.json", "{\"model_type\":");
    says(&folder.refused(), &["config.json is not valid JSON", "line 1"]);
    folder.remove("config.json");
    std::fs::create_dir(folder.path().join("config.json")).unwrap();
    says(&folder.refused(), &["config.json", "a file of at most"]);
}

#[test]
fn headers_that_lie_are_refused_with_the_numbers() {
    let folder = Folder::new("headers");
    folder.write_json("config.json", &config("llama"));
    let refused = |bytes: &[u8]| {
        folder.write("model.safetensors", bytes);
        folder.refused()
    };
    says(&refused(b""), &["0 bytes", "header's length"]);
    says(&refused(&[1, 0, 0]), &["3 bytes"]);
    says(&refused(&u64::MAX.to_le_bytes()), &["18446744073709551615 bytes", "0 are there"]);
    says(&refused(&[100, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']), &["100 bytes", "2 are there"]);
    for (header, parts) in [
        ("{", &["does not parse"][..]),
        ("[]", &["does not parse"]),
        ("{\"\u{1}\": 1}", &["does not parse"]),
        (r#"{"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#, &["does not parse"]),
        (r#"{"t":{"dtype":"F32","shape":[1]}}"#, &["data_offsets"]),
        (r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#, &["does not parse"]),
        (r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, &["tensor t", "4 to 0 of 8"]),
        (r#"{"t":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, &["tensor t", "0 to 12 of 8"]),
        (r#"{"t":{"dtype":"U8","shape":[3],"data_offsets":[0,12]}}"#, &["tensor t", "0 to 12 of 8"]),
        (
            r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551615]}}"#,
            &["18446744073709551615 of 8"],
        ),
        (r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}"#, &["F32 [1]", "8 bytes"]),
        (r#"{"t":{"dtype":"F16","shape":[1,0],"data_offsets":[0,8]}}"#, &["F16 [1, 0]", "8 bytes"]),
        (
            r#"{"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
            &["impossible shape"],
        ),
        (r#"{"t":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}"#, &["4 bytes"]),
        (
            r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            &["tensor t appears twice"],
        ),
    ] {
        let error = refused(&raw_safetensors(header, &[0; 8]));
        says(&error, &["model.safetensors"]);
        says(&error, parts);
    }
    let mut bytes = raw_safetensors("{\"xx\":1}", &[]);
    bytes[10] = 0xff;
    says(&refused(&bytes), &["does not parse"]);
}

#[test]
fn types_that_are_not_read_matter_only_where_the_model_needs_them() {
    let (folder, model) = single("types", &config("llama"));
    let good = safetensors_file(&model, DType::F32, model.names());
    let length = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let (header, data) = (std::str::from_utf8(&good[8..8 + length]).unwrap(), &good[8 + length..]);
    let mut lines: Value = serde_json::from_str(header).unwrap();
    lines["extra"] = json!({"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]});
    folder.write("model.safetensors", raw_safetensors(&lines.to_string(), data));
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(opened.unused(), ["extra"]);
    says(&opened.tensor("extra").unwrap_err().to_string(), &["tensor extra", "F8_E5M2", "BF16"]);
    says(&opened.tensor("absent").unwrap_err().to_string(), &["no tensor absent", "22 others"]);

    lines["model.norm.weight"]["dtype"] = json!("I32");
    folder.write("model.safetensors", raw_safetensors(&lines.to_string(), data));
    says(&folder.refused(), &["tensor model.norm.weight", "I32", "F16"]);
}

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: (&str, &str) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");

const DUMMY_CONFIG: &str = r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []}"#;

#[test]
fn a_dummy_needs_a_configuration_and_nothing_else() {
    let folder = Folder::new("a_dummy_needs_a_configuration");
    folder.write("config.json", DUMMY_CONFIG);
    let exact = Checkpoint::dummy(folder.path(), DType::F32).unwrap();
    let packed = Checkpoint::dummy(folder.path(), DType::Q8_0).unwrap();
    assert_eq!(packed.folder(), Some(folder.path()));
    for (name, dtype) in [
        ("model.layers.1.mlp.experts.3.down_proj.weight", DType::Q8_0),
        ("model.layers.1.mlp.gate.weight", DType::F32),
        ("model.norm.weight", DType::F32),
    ] {
        let (exact, packed) = (exact.tensor(name).unwrap(), packed.tensor(name).unwrap());
        assert_eq!(packed.dtype, dtype, "{name}");
        let largest = dequantize(&exact).iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        for (a, b) in dequantize(&exact).iter().zip(dequantize(&packed)) {
            assert!((a - b).abs() <= largest / 127.0, "{name}: {a} became {b}");
        }
    }
    assert!(Checkpoint::dummy(folder.path().join("absent"), DType::F32).is_err());
    // Elements are those of synthetic models, but for attention's share of the residual stream.
    let synthetic = Checkpoint::synthetic(DUMMY_CONFIG, 0).unwrap();
    for name in exact.names() {
        let factor = if name.ends_with("o_proj.weight") { 0.1 / 2.0 } else { 1.0 };
        let (found, other) = (exact.tensor(name).unwrap(), synthetic.tensor(name).unwrap());
        for (a, b) in dequantize(&found).iter().zip(dequantize(&other)) {
            assert!((a - factor * b).abs() <= 1e-6 * b.abs(), "{name}: {a}, and {b} in a synthetic model");
        }
    }
}

/// A device makes such tensors from their recipes; who asks for bytes gets those of the others.
#[test]
fn dummies_that_are_made_late_are_the_same() {
    let folder = Folder::new("dummies_that_are_made_late");
    folder.write("config.json", DUMMY_CONFIG);
    let made = Checkpoint::dummy(folder.path(), DType::BF16).unwrap();
    let unmade = Checkpoint::dummy_unmade(folder.path(), DType::BF16).unwrap();
    assert_eq!(made.total_bytes(), unmade.total_bytes());
    for name in made.names() {
        let (made, unmade) = (made.tensor(name).unwrap(), unmade.tensor(name).unwrap());
        assert!(made.recipe().is_none() && unmade.recipe().is_some(), "{name}");
        assert!(made.bytes() == unmade.bytes(), "{name}");
        assert_eq!(unmade.identity(), unmade.clone().identity());
    }
}

/// What a checkpoint would have in FP8 is so, in each form of scales, and near what it would be otherwise.
#[test]
fn late_dummies_of_fp8_configurations_are_codes() {
    const UP: &str = "model.layers.0.mlp.experts.3.up_proj.weight";
    for (scheme, shape) in [
        (r#"{"quant_method": "fp8", "weight_block_size": [16, 16]}"#, vec![2, 2]),
        (r#"{"quant_method": "fp8"}"#, vec![]),
        (r#"{"quant_method": "fbgemm_fp8"}"#, vec![32, 1]),
    ] {
        let folder = Folder::new("late_dummies_of_fp8");
        let config = DUMMY_CONFIG.trim_end().strip_suffix('}').unwrap();
        folder.write("config.json", format!("{config}, \"quantization_config\": {scheme}}}"));
        let unmade = Checkpoint::dummy_unmade(folder.path(), DType::BF16).unwrap();
        let exact = Checkpoint::dummy(folder.path(), DType::F32).unwrap();
        for name in [UP, "model.layers.1.self_attn.o_proj.weight"] {
            let (codes, exact) = (unmade.tensor(name).unwrap(), dequantize(&exact.tensor(name).unwrap()));
            assert!(codes.dtype == DType::F8_E4M3 && codes.recipe().is_some(), "{name}");
            let largest = exact.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            for (a, b) in exact.iter().zip(dequantize(&codes)) {
                // Half of the last of 4 bits, or of the smallest code.
                assert!((a - b).abs() <= a.abs() / 16.0 + largest / 448.0 / 512.0, "{name}: {a} became {b}");
            }
        }
        let up = unmade.tensor(UP).unwrap();
        assert_eq!(up.scales().unwrap().shape, shape);
        for name in ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"] {
            assert!(!unmade.contains(name) || unmade.tensor(name).unwrap().dtype != DType::F8_E4M3);
        }
        let plain = Checkpoint::dummy_unmade(folder.path(), DType::F16).unwrap();
        assert_eq!(plain.tensor(UP).unwrap().dtype, DType::F16);
    }
}
