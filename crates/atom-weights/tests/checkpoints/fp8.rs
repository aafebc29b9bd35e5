//! FP8 folders in every published way of writing them, and what is refused.

use crate::common::{Folder, config, config_with, moe_config, refused, says, synthetic};
use atom_weights::{Checkpoint, DType, Fp8Scales, dequantize, quant};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Tensors to be written: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Which weights share a scale.
#[derive(Clone, Copy)]
enum Form {
    Tensor,
    Channel,
    Block(usize),
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

/// All matrices of a model's layers as codes that are their own numbers, with scales 1, 2, 3 ..; the others as bf16.
fn tensors(model: &Checkpoint, form: Form, scale_name: &str) -> Tensors {
    let mut tensors = Tensors::new();
    for name in model.names() {
        let tensor = model.tensor(name).unwrap();
        let (shape, values) = (tensor.shape.clone(), dequantize(&tensor));
        let Some(module) = name.strip_suffix("_proj.weight") else {
            tensors.insert(name.into(), (Dtype::BF16, shape, quant::quantize(DType::BF16, &values)));
            continue;
        };
        let scales = match form {
            Form::Tensor => vec![],
            Form::Channel => vec![shape[0], 1],
            Form::Block(side) => vec![shape[0].div_ceil(side), shape[1].div_ceil(side)],
        };
        let count: usize = scales.iter().product();
        let numbers: Vec<f32> = (1..=count).map(|i| i as f32).collect();
        let codes = quant::quantize(DType::F8_E4M3, &values);
        tensors.insert(name.into(), (Dtype::F8_E4M3, shape, codes));
        let bytes = quant::quantize(DType::BF16, &numbers);
        tensors.insert(format!("{module}_proj.{scale_name}"), (Dtype::BF16, scales, bytes));
    }
    tensors
}

fn write(folder: &Folder, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (kind, shape, data))| (name, TensorView::new(*kind, shape.clone(), data).unwrap()));
    folder.write("model.safetensors", safetensors::serialize(views, None).unwrap());
}

fn block(side: usize) -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [side, side], "modules_to_not_convert": ["lm_head"]})
}

fn groups(weights: &Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

#[test]
fn every_published_way_of_writing_fp8_is_read() {
    let weights = |strategy: &str, block: Value| {
        groups(
            &json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "block_structure": block}),
        )
    };
    let algo = |algo: &str| json!({"quant_method": "modelopt", "quant_algo": algo});
    let tensor = Fp8Scales::Tensor;
    for (quantization, form, scale_name, expected) in [
        (block(16), Form::Block(16), "weight_scale_inv", Fp8Scales::Block { rows: 16, cols: 16 }),
        (json!({"quant_method": "fp8", "activation_scheme": "static"}), Form::Tensor, "weight_scale", tensor),
        (json!({"quant_method": "fp8", "weight_block_size": null}), Form::Tensor, "weight_scale_inv", tensor),
        (weights("tensor", Value::Null), Form::Tensor, "weight_scale", tensor),
        (weights("channel", Value::Null), Form::Channel, "weight_scale", Fp8Scales::Channel),
        (
            weights("block", json!([48, 48])),
            Form::Block(48),
            "weight_scale",
            Fp8Scales::Block { rows: 48, cols: 48 },
        ),
        (
            weights("block", json!("32x32")),
            Form::Block(32),
            "weight_scale",
            Fp8Scales::Block { rows: 32, cols: 32 },
        ),
        (algo("FP8"), Form::Tensor, "weight_scale", tensor),
        (algo("FP8_PER_CHANNEL_PER_TOKEN"), Form::Channel, "weight_scale", Fp8Scales::Channel),
        (json!({"quant_method": "fbgemm_fp8"}), Form::Channel, "weight_scale", Fp8Scales::Channel),
    ] {
        let (folder, model) = (Folder::new("fp8-ways"), synthetic(&config("qwen3")));
        let mut changed = config("qwen3");
        changed["quantization_config"] = quantization;
        folder.write_json("config.json", &changed);
        write(&folder, &tensors(&model, form, scale_name));
        let dummy = Checkpoint::dummy(folder.path(), DType::BF16).unwrap();
        assert!(dummy.description().ends_with("BF16"), "{dummy:?}");
        let opened = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(opened.config().fp8, Some(expected));
        assert!(opened.names().eq(model.names()) && opened.unused().is_empty());
        assert!(opened.description().ends_with(&format!("F8_E4M3 with {expected}")), "{opened:?}");
        for name in model.names() {
            let (found, original) = (opened.tensor(name).unwrap(), model.tensor(name).unwrap());
            let (stored, cols) = (found.dtype, found.cols());
            let scale = |index: usize| match (form, found.scales()) {
                (_, None) => 1.0,
                (Form::Tensor, _) => 1.0,
                (Form::Channel, _) => (index / cols + 1) as f32,
                (Form::Block(side), _) => {
                    (index / cols / side * cols.div_ceil(side) + index % cols / side + 1) as f32
                }
            };
            let codes = quant::dequantize_bytes(stored, &quant::quantize(stored, &dequantize(&original)));
            let expected: Vec<f32> = codes.iter().enumerate().map(|(i, code)| code * scale(i)).collect();
            assert_eq!(dequantize(&found), expected, "{name}");
            assert_eq!(stored == DType::F8_E4M3, name.ends_with("_proj.weight"), "{name}");
        }
    }
}

/// In the file's own spelling of experts, with scales of activations and of a cache beside them.
#[test]
fn experts_find_their_scales_and_scales_of_activations_are_left_alone() {
    let (folder, model) = (Folder::new("fp8-experts"), synthetic(&moe_config("mixtral")));
    let quantization = json!({"quant_method": "fp8", "activation_scheme": "static"});
    folder.write_json("config.json", &config_with("mixtral", &json!({"quantization_config": quantization})));
    let mut file = Tensors::new();
    for (name, tensor) in tensors(&model, Form::Tensor, "weight_scale") {
        let mut name = name.replace(".mlp.", ".block_sparse_moe.");
        for (here, there) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")] {
            name = name.replace(here, there);
        }
        if let Some(module) = name.strip_suffix("weight_scale") {
            file.insert(format!("{module}input_scale"), (Dtype::F32, vec![], vec![0; 4]));
        }
        file.insert(name, tensor);
    }
    let inputs = file.keys().filter(|name| name.ends_with("input_scale")).count();
    for name in ["k_scale", "v_scale"] {
        let name = format!("model.layers.1.self_attn.{name}");
        file.insert(name, (Dtype::F32, vec![], vec![0; 4]));
    }
    write(&folder, &file);
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert!(opened.names().eq(model.names()) && opened.unused().is_empty());
    assert_eq!(opened.unused_scales(), inputs + 2);
    let expert = opened.tensor("model.layers.1.mlp.experts.7.down_proj.weight").unwrap();
    assert_eq!((expert.dtype, expert.scales().map(|s| s.dtype)), (DType::F8_E4M3, Some(DType::BF16)));
}

#[test]
fn what_modelopt_writes_beside_a_silent_config_counts() {
    let (folder, model) = (Folder::new("fp8-modelopt"), synthetic(&config("llama")));
    folder.write_json("config.json", &config("llama"));
    write(&folder, &tensors(&model, Form::Tensor, "weight_scale"));
    says(&folder.refused(), &["F8_E4M3", "no quantization_config"]);
    let says_of =
        |algo: &str| json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo}});
    folder.write_json("hf_quant_config.json", &says_of("NVFP4"));
    says(&folder.refused(), &["hf_quant_config.json", "quantization.quant_algo NVFP4"]);
    folder.write_json("hf_quant_config.json", &says_of("FP8"));
    assert_eq!(Checkpoint::open(folder.path()).unwrap().config().fp8, Some(Fp8Scales::Tensor));
}

#[test]
fn scales_that_are_missing_or_wrong_are_named_with_their_shapes() {
    let model = synthetic(&config("qwen3"));
    let scale = "model.layers.0.self_attn.q_proj.weight_scale_inv";
    let good = || tensors(&model, Form::Block(48), "weight_scale_inv");
    let folder = Folder::new("fp8-bad");
    folder.write_json("config.json", &config_with("qwen3", &json!({"quantization_config": block(48)})));
    type Change = fn(&mut Tensors, &str);
    for (change, parts) in [
        (
            (|file, scale| {
                file.remove(scale);
            }) as Change,
            &[
                Q,
                "[128, 64]",
                "q_proj.weight_scale_inv",
                "q_proj.weight_scale ",
                "[3, 2]",
                "blocks of 48 x 48",
            ][..],
        ),
        (
            |file, scale| {
                file.insert(scale.into(), (Dtype::F32, vec![2, 3], vec![0; 24]));
            },
            &[Q, "[128, 64]", "weight_scale_inv has shape [2, 3]", "shape [3, 2]"],
        ),
        (
            |file, scale| {
                file.insert(scale.into(), (Dtype::F32, vec![], vec![0; 4]));
            },
            &[Q, "has shape []", "[3, 2]"],
        ),
        (
            |file, scale| {
                file.insert(scale.into(), (Dtype::U8, vec![3, 2], vec![0; 6]));
            },
            &[Q, "weight_scale_inv as U8", "F32, F16 or BF16"],
        ),
        (
            |file, scale| {
                file.insert(scale.into(), (Dtype::F8_E4M3, vec![3, 2], vec![0; 6]));
            },
            &[Q, "weight_scale_inv as F8_E4M3"],
        ),
        (
            |file, scale| {
                let name = scale.trim_end_matches("_inv").to_owned();
                file.insert(name, (Dtype::F32, vec![3, 2], vec![0; 24]));
            },
            &[Q, "both", "weight_scale_inv", "only one"],
        ),
        (
            |file, _| {
                file.insert("model.norm.weight".into(), (Dtype::F8_E4M3, vec![64], vec![0; 64]));
            },
            &["model.norm.weight", "[64]", "matrices only"],
        ),
        (
            |file, _| {
                file.insert(Q.into(), (Dtype::F8_E5M2, vec![128, 64], vec![0; 8192]));
            },
            &[Q, "F8_E5M2", "not supported"],
        ),
        (
            |file, _| {
                file.insert(Q.into(), (Dtype::I8, vec![128, 64], vec![0; 8192]));
            },
            &[Q, "stored as I8", "not supported"],
        ),
    ] {
        let mut file = good();
        change(&mut file, scale);
        write(&folder, &file);
        says(&folder.refused(), parts);
    }
    write(&folder, &good());
    Checkpoint::open(folder.path()).unwrap();
}

/// One tensor for all experts has no published way of scaling it.
#[test]
fn a_stack_of_experts_in_fp8_is_refused() {
    let config = moe_config("qwen3_moe");
    let model = synthetic(&config);
    let mut file = tensors(&model, Form::Block(16), "weight_scale_inv");
    file.retain(|name, _| !name.contains("layers.1.mlp.experts."));
    for (name, shape) in [("gate_up_proj", vec![8, 64, 64]), ("down_proj", vec![8, 64, 32])] {
        let len = shape.iter().product();
        file.insert(format!("model.layers.1.mlp.experts.{name}"), (Dtype::F8_E4M3, shape, vec![0; len]));
    }
    let folder = Folder::new("fp8-stack");
    folder.write_json("config.json", &config_with("qwen3_moe", &json!({"quantization_config": block(16)})));
    write(&folder, &file);
    says(&folder.refused(), &["model.layers.1.mlp.experts.0.gate_proj.weight", "matrices only"]);
}

#[test]
fn other_formats_are_refused_by_name() {
    let weights = |bits: u32, kind: &str, strategy: &str| {
        groups(&json!({"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": true}))
    };
    let with = |mut base: Value, key: &str, value: Value| {
        base[key] = value;
        base
    };
    let good = || weights(8, "float", "tensor");
    let mixed = json!({
        "a": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
        "b": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}});
    for (quantization, parts) in [
        (json!({"quant_method": "awq"}), &["quantization_config (awq)", "compressed-tensors"][..]),
        (json!({"quant_method": "mxfp4"}), &["quantization_config (mxfp4)"]),
        (json!({"bits": 4}), &["an unnamed method"]),
        (with(block(128), "fmt", json!("e5m2")), &["quantization_config.fmt e5m2"]),
        (
            with(block(128), "weight_block_size", json!([128])),
            &["weight_block_size is [128]", "two whole numbers"],
        ),
        (with(block(128), "weight_block_size", json!([0, 128])), &["weight_block_size is [0,128]"]),
        (json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), &["quant_algo NVFP4"]),
        (json!({"quant_method": "modelopt"}), &["quant_algo that is missing"]),
        (weights(8, "int", "channel"), &["config_groups.group_0.weights of 8 bits and type \"int\""]),
        (weights(4, "float", "tensor"), &["of 4 bits and type \"float\""]),
        (weights(8, "float", "group"), &["weights.strategy \"group\""]),
        (weights(8, "float", "block"), &["block_structure is null"]),
        (with(good(), "format", json!("pack-quantized")), &["format pack-quantized"]),
        (with(good(), "format", json!("nvfp4-pack-quantized")), &["format nvfp4-pack-quantized"]),
        (with(good(), "sparsity_config", json!({"format": "sparse-24-bitmask"})), &["sparse-24-bitmask"]),
        (with(good(), "config_groups", json!({})), &["config_groups has no group"]),
        (
            with(good(), "config_groups", json!({"g": {"targets": []}})),
            &["config_groups.g.weights is missing"],
        ),
        (
            with(good(), "config_groups", mixed),
            &["several kinds", "a: scales for whole tensors", "b: scales for channels"],
        ),
    ] {
        let changed = config_with("qwen3", &json!({"quantization_config": quantization}));
        let error = refused(Checkpoint::synthetic(&changed.to_string(), 0));
        says(&error, parts);
    }
    let both = config_with("qwen3", &json!({"quantization_config": block(8), "compression_config": good()}));
    says(&refused(Checkpoint::synthetic(&both.to_string(), 0)), &["compression_config", "beside"]);
}
