//! Experts in files: the spellings and stacks that there are, and what is refused.

use crate::common::{
    Folder, MOE_FAMILIES, config_with, moe_config, raw_safetensors, refused, safetensors_file, says,
    synthetic,
};
use atom_weights::gguf::{Gguf, write, write::GgufWriter};
use atom_weights::quant::quantize;
use atom_weights::{Checkpoint, DType, QkNorm, RopeLayout, Scoring, WeightsError, dequantize};
use serde_json::{Value, json};
use std::path::Path;

/// A tensor of a file in the making: name, shape and f32 bytes.
type Raw = (String, Vec<usize>, Vec<u8>);

/// All tensors of a model under other names; those that `rename` has none for are left out.
fn raw(model: &Checkpoint, rename: impl Fn(&str) -> Option<String>) -> Vec<Raw> {
    let tensor = |name: &str| {
        let tensor = model.tensor(name).unwrap();
        Some((rename(name)?, tensor.shape.clone(), tensor.bytes().to_vec()))
    };
    model.names().filter_map(tensor).collect()
}

fn safetensors(tensors: &[Raw]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    raw_safetensors(&Value::Object(header).to_string(), &data)
}

fn folder(name: &str, config: &Value, tensors: &[Raw]) -> Folder {
    let folder = Folder::new(name);
    folder.write_json("config.json", config);
    folder.write("model.safetensors", safetensors(tensors));
    folder
}

/// Mixtral's and MiniMax-M2's names.
fn block_sparse(name: &str) -> String {
    let name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score");
    let name = name.replace(".mlp.", ".block_sparse_moe.");
    let letter = |name: String, matrix: &str, letter: &str| match name.contains("experts.") {
        true => name.replace(matrix, letter),
        false => name,
    };
    letter(letter(letter(name, "gate_proj", "w1"), "up_proj", "w3"), "down_proj", "w2")
}

/// The experts of a model as transformers has them in memory, [experts, 2 * width, hidden] and
/// [experts, hidden, width]; everything else as it is.
fn fused(model: &Checkpoint) -> Vec<Raw> {
    let moe = model.config().moe.as_ref().unwrap();
    let (hidden, width) = (model.config().hidden_size, moe.expert_width);
    let mut tensors = raw(model, |name| (!name.contains(".experts.")).then(|| name.to_owned()));
    for layer in (0..model.config().layers).filter(|&layer| !model.config().is_dense(layer)) {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let stack = |matrices: &[&str]| {
            let names = (0..moe.experts)
                .flat_map(|expert| matrices.iter().map(move |matrix| (expert, *matrix)))
                .map(|(expert, matrix)| format!("{prefix}.{expert}.{matrix}.weight"));
            names.flat_map(|name| model.tensor(&name).unwrap().bytes().to_vec()).collect::<Vec<u8>>()
        };
        let gate_up = (format!("{prefix}.gate_up_proj"), vec![moe.experts, 2 * width, hidden]);
        tensors.push((gate_up.0, gate_up.1, stack(&["gate_proj", "up_proj"])));
        let down = (format!("{prefix}.down_proj"), vec![moe.experts, hidden, width]);
        tensors.push((down.0, down.1, stack(&["down_proj"])));
    }
    tensors
}

/// Same tensors by the same names.
#[track_caller]
fn same(found: &Checkpoint, expected: &Checkpoint) {
    assert_eq!(found.config(), expected.config());
    assert!(found.names().eq(expected.names()) && found.unused().is_empty());
    assert_eq!(found.parameters(), expected.parameters());
    for name in expected.names() {
        let (found, expected) = (found.tensor(name).unwrap(), expected.tensor(name).unwrap());
        assert_eq!((&found.shape, found.bytes()), (&expected.shape, expected.bytes()), "{name}");
    }
}

fn open(writer: &GgufWriter) -> Result<Checkpoint, WeightsError> {
    Checkpoint::from_gguf(Gguf::from_bytes(writer.finish(), Path::new("model.gguf"))?)
}

#[test]
fn experts_have_the_same_names_whichever_way_a_folder_spells_them() {
    for family in MOE_FAMILIES {
        let config = moe_config(family);
        let model = synthetic(&config);
        let plain = Folder::new(&format!("plain-{family}"));
        plain.write_json("config.json", &config);
        plain.write("model.safetensors", safetensors_file(&model, DType::F32, model.names()));
        same(&Checkpoint::open(plain.path()).unwrap(), &model);
        let stacked = folder(&format!("fused-{family}"), &config, &fused(&model));
        same(&Checkpoint::open(stacked.path()).unwrap(), &model);
    }
    for family in ["mixtral", "minimax_m2"] {
        let config = moe_config(family);
        let model = synthetic(&config);
        let spelled = raw(&model, |name| Some(block_sparse(name)));
        assert!(spelled.iter().any(|(name, _, _)| name.ends_with("block_sparse_moe.experts.7.w3.weight")));
        let spelled = folder(&format!("letters-{family}"), &config, &spelled);
        same(&Checkpoint::open(spelled.path()).unwrap(), &model);
    }
    // Where transformers has MiniMax-M2's bias.
    let model = synthetic(&moe_config("minimax_m2"));
    let moved = raw(&model, |name| Some(name.replace(".mlp.gate.e_score", ".mlp.e_score")));
    let moved = folder("moved-bias", &moe_config("minimax_m2"), &moved);
    same(&Checkpoint::open(moved.path()).unwrap(), &model);
}

/// Layers after the last predict further tokens: files have them, a forward pass has no use for them.
#[test]
fn layers_beyond_the_last_are_of_no_use_and_no_error() {
    let config = moe_config("glm4_moe");
    let model = synthetic(&config);
    let mut tensors = raw(&model, |name| Some(name.to_owned()));
    let further: Vec<Raw> = tensors
        .iter()
        .filter(|(name, _, _)| name.contains("layers.1."))
        .map(|(name, shape, bytes)| (name.replace("layers.1.", "layers.2."), shape.clone(), bytes.clone()))
        .chain([("model.layers.2.eh_proj.weight".to_owned(), vec![1], vec![0; 4])])
        .collect();
    tensors.extend(further.clone());
    let folder = folder("mtp", &config, &tensors);
    let opened = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(opened.unused().len(), further.len());
    assert_eq!(opened.parameters(), model.parameters());
}

#[test]
fn stacks_of_another_shape_and_experts_that_are_there_twice_are_refused() {
    let config = moe_config("mixtral");
    let model = synthetic(&config);
    let with = |name: &str, change: &dyn Fn(&mut Vec<Raw>)| {
        let mut tensors = fused(&model);
        change(&mut tensors);
        folder(name, &config, &tensors).refused()
    };
    for (label, shape) in [("flat", vec![512, 64]), ("fewer", vec![4, 128, 64]), ("turned", vec![8, 32, 128])]
    {
        let error = with(label, &|tensors| {
            let stack = tensors.iter_mut().find(|(name, _, _)| name.ends_with("1.mlp.experts.gate_up_proj"));
            stack.unwrap().1.clone_from(&shape);
        });
        says(&error, &["model.layers.1.mlp.experts.gate_up_proj has shape", "[8, 64, 64]"]);
    }
    let twice = with("twice", &|tensors| {
        tensors.push((
            "model.layers.0.block_sparse_moe.experts.3.w2.weight".into(),
            vec![64, 32],
            vec![0; 8192],
        ));
    });
    says(&twice, &["model.layers.0.mlp.experts.3.down_proj.weight appears twice"]);
    let twice = with("twice-gate", &|tensors| {
        tensors.push(("model.layers.0.block_sparse_moe.gate.weight".into(), vec![8, 64], vec![0; 2048]));
    });
    says(&twice, &["model.layers.0.mlp.gate.weight appears twice"]);
    let missing =
        with("missing", &|tensors| tensors.retain(|(name, _, _)| !name.ends_with("experts.down_proj")));
    says(
        &missing,
        &["model.layers.0.mlp.experts.0.down_proj.weight of shape [64, 32] is missing", "mixtral"],
    );
}

#[test]
fn a_written_model_is_the_model() {
    for family in MOE_FAMILIES {
        for changes in [json!({}), json!({"num_hidden_layers": 3})] {
            let model = synthetic(&config_with(family, &changes));
            let opened = open(&write::from_checkpoint(&model, DType::F32).unwrap()).unwrap();
            let (mut found, expected) = (opened.config().clone(), model.config());
            if family == "mixtral" {
                assert_eq!(found.rope.layout, RopeLayout::Pairs);
                found.rope.layout = RopeLayout::Halves;
            }
            assert_eq!(&found, expected);
            assert!(opened.names().eq(model.names()) && opened.unused().is_empty());
            for name in model.names() {
                let permuted = family == "mixtral" && (name.contains("q_proj") || name.contains("k_proj"));
                let (found, expected) = (opened.tensor(name).unwrap(), model.tensor(name).unwrap());
                assert_eq!(found.shape, expected.shape);
                assert_eq!(found.bytes() == expected.bytes(), !permuted, "{name}");
            }
        }
    }
    // Dense layers anywhere, weights that are not normalised.
    let changes = json!({"num_hidden_layers": 4, "mlp_only_layers": [2], "norm_topk_prob": false});
    let model = synthetic(&config_with("qwen3_moe", &changes));
    let opened = open(&write::from_checkpoint(&model, DType::F32).unwrap()).unwrap();
    assert_eq!(opened.config(), model.config());
}

/// Each expert's blocks are those that its own matrix would be stored as, and the router is not rounded.
#[test]
fn quantised_experts_are_views_of_whole_blocks() {
    for family in MOE_FAMILIES {
        let model = synthetic(&moe_config(family));
        for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1] {
            let opened = open(&write::from_checkpoint(&model, dtype).unwrap()).unwrap();
            for expert in [0, 1, 7] {
                for matrix in ["gate", "up", "down"] {
                    let name = format!("model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight");
                    let (found, whole) = (opened.tensor(&name).unwrap(), model.tensor(&name).unwrap());
                    assert_eq!((found.dtype, &found.shape), (dtype, &whole.shape));
                    assert_eq!(found.bytes(), quantize(dtype, &dequantize(&whole)), "{family} {name}");
                }
            }
            let router = opened.tensor("model.layers.1.mlp.gate.weight").unwrap();
            assert_eq!(router.bytes(), model.tensor("model.layers.1.mlp.gate.weight").unwrap().bytes());
        }
    }
    let narrow = synthetic(&config_with("qwen3_moe", &json!({"moe_intermediate_size": 48})));
    let error = write::from_checkpoint(&narrow, DType::Q8_0).unwrap_err().to_string();
    says(&error, &["experts.0.down_proj.weight of 48 columns as Q8_0"]);
}

/// One layer of 4 experts in an architecture, the key that `but` names left out. Experts' tensors and
/// those of one architecture are added by the caller.
fn one_layer(architecture: &str, but: &str, more: impl FnOnce(&mut GgufWriter)) -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer.string("general.architecture", architecture);
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 128),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("expert_count", 4),
        ("expert_used_count", 2),
    ] {
        if key != but {
            writer.u32(&format!("{architecture}.{key}"), value);
        }
    }
    writer.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-5);
    more(&mut writer);
    for (name, shape) in [
        ("token_embd.weight", &[40, 32][..]),
        ("output_norm.weight", &[32]),
        ("blk.0.attn_norm.weight", &[32]),
        ("blk.0.attn_q.weight", &[32, 32]),
        ("blk.0.attn_k.weight", &[32, 32]),
        ("blk.0.attn_v.weight", &[32, 32]),
        ("blk.0.attn_output.weight", &[32, 32]),
        ("blk.0.ffn_gate_inp.weight", &[4, 32]),
    ] {
        zeros(&mut writer, name, shape);
    }
    writer
}

fn mixtral(but: &str, more: impl FnOnce(&mut GgufWriter)) -> GgufWriter {
    let mut writer = one_layer("llama", but, more);
    zeros(&mut writer, "blk.0.ffn_norm.weight", &[32]);
    writer
}

fn zeros(writer: &mut GgufWriter, name: &str, shape: &[usize]) {
    writer.tensor(name, DType::F32, shape, &vec![0; 4 * shape.iter().product::<usize>()]);
}

fn stacks(writer: &mut GgufWriter) {
    zeros(writer, "blk.0.ffn_gate_exps.weight", &[4, 64, 32]);
    zeros(writer, "blk.0.ffn_up_exps.weight", &[4, 64, 32]);
    zeros(writer, "blk.0.ffn_down_exps.weight", &[4, 32, 64]);
}

#[test]
fn a_llama_with_experts_is_a_mixtral() {
    let mut writer = mixtral("", |_| {});
    stacks(&mut writer);
    let stacked = open(&writer).unwrap();
    assert_eq!(stacked.config().architecture.name(), "mixtral");
    let moe = stacked.config().moe.as_ref().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.expert_width), (4, 2, 64));
    assert_eq!((moe.scoring, moe.normalise, moe.scale), (Scoring::Softmax, true, 1.0));

    // The first files had a tensor for each expert.
    let mut writer = mixtral("", |_| {});
    for expert in 0..4 {
        for (matrix, shape) in [("gate", [64, 32]), ("up", [64, 32]), ("down", [32, 64])] {
            zeros(&mut writer, &format!("blk.0.ffn_{matrix}.{expert}.weight"), &shape);
        }
    }
    assert!(open(&writer).unwrap().names().eq(stacked.names()));
    // Newer ones may have gate and up as one.
    let mut writer = mixtral("", |_| {});
    zeros(&mut writer, "blk.0.ffn_gate_up_exps.weight", &[4, 128, 32]);
    zeros(&mut writer, "blk.0.ffn_down_exps.weight", &[4, 32, 64]);
    assert!(open(&writer).unwrap().names().eq(stacked.names()));
}

/// What llama.cpp takes for granted where a file has no key for it.
#[test]
fn defaults_are_those_of_the_reader_that_the_files_are_made_for() {
    let moe = |architecture: &str, tensors: &[(&str, &[usize])]| {
        let width = |w: &mut GgufWriter| {
            w.u32(&format!("{architecture}.expert_feed_forward_length"), 64);
        };
        let mut writer = one_layer(architecture, "", width);
        stacks(&mut writer);
        for (name, shape) in tensors {
            zeros(&mut writer, name, shape);
        }
        let model = open(&writer).unwrap();
        assert!(model.unused().is_empty(), "{:?}", model.unused());
        let config = model.config().clone();
        let moe = config.moe.clone().unwrap();
        assert_eq!((moe.experts, moe.top_k, moe.groups, moe.groups_kept, moe.scale), (4, 2, 1, 1, 1.0));
        assert_eq!((moe.expert_width, moe.shared_width, moe.dense_layers), (64, 0, vec![false]));
        assert_eq!(config.rope.layout, RopeLayout::Halves);
        (moe.scoring, moe.normalise, moe.selection_bias, config.qk_norm)
    };
    let qwen: &[(&str, &[usize])] = &[
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.attn_q_norm.weight", &[8]),
        ("blk.0.attn_k_norm.weight", &[8]),
    ];
    assert_eq!(moe("qwen3moe", qwen), (Scoring::Softmax, true, false, QkNorm::PerHead));
    let glm: &[(&str, &[usize])] =
        &[("blk.0.post_attention_norm.weight", &[32]), ("blk.0.exp_probs_b.bias", &[4])];
    assert_eq!(moe("glm4moe", glm), (Scoring::Sigmoid, false, true, QkNorm::None));
    assert_eq!(moe("glm4moe", &glm[..1]), (Scoring::Sigmoid, false, false, QkNorm::None));
    let minimax: &[(&str, &[usize])] = &[
        ("blk.0.ffn_norm.weight", &[32]),
        ("blk.0.attn_q_norm.weight", &[32]),
        ("blk.0.attn_k_norm.weight", &[32]),
    ];
    assert_eq!(moe("minimax-m2", minimax), (Scoring::Sigmoid, true, false, QkNorm::Whole));
}

#[test]
fn headers_that_are_not_built_or_contradict_are_named() {
    type More = fn(&mut GgufWriter) -> &mut GgufWriter;
    let cases: [(&str, More, &[&str]); 13] = [
        ("expert_used_count", |w| w, &["llama.expert_used_count is missing"]),
        (
            "expert_used_count",
            |w| w.u32("llama.expert_used_count", 5),
            &["expert_used_count is 5", "expert_count = 4"],
        ),
        ("expert_count", |w| w.u32("llama.expert_count", 5000), &["llama.expert_count is 5000", "4096"]),
        (
            "expert_count",
            |w| w.u32("llama.expert_count", 8),
            &["experts.gate_proj.weight", "[4, 64, 32]", "[8, 64, 32]"],
        ),
        ("", |w| w.u32("llama.expert_gating_func", 2), &["expert_gating_func = 2", "1 (Softmax)"]),
        ("", |w| w.bool("llama.expert_weights_norm", false), &["expert_weights_norm = false", "only true"]),
        ("", |w| w.f32("llama.expert_weights_scale", -1.0), &["expert_weights_scale is -1"]),
        ("", |w| w.u32("llama.expert_shared_count", 1), &["expert_shared_count = 1"]),
        ("", |w| w.u32("llama.expert_group_count", 2), &["expert_group_count is 2", "sigmoid"]),
        ("", |w| w.u32("llama.leading_dense_block_count", 2), &["leading_dense_block_count is 2", "0 to 1"]),
        ("", |w| w.u32("llama.nextn_predict_layers", 1), &["nextn_predict_layers is 1", "block_count = 1"]),
        ("", |w| w.u32("llama.attention.sliding_window", 64), &["sliding_window = 64"]),
        ("", |w| w.i32s("llama.rope.dimension_sections", &[2, 1, 1, 0]), &["rope.dimension_sections"]),
    ];
    for (but, more, parts) in cases {
        let mut writer = mixtral(but, |w| {
            more(w);
        });
        stacks(&mut writer);
        says(&refused(open(&writer)), parts);
    }
    // A number of 0 is none.
    let mut writer = mixtral("", |w| {
        w.u32("llama.expert_group_count", 0).u32("llama.expert_gating_func", 0);
        w.f32("llama.expert_weights_scale", 0.0);
    });
    stacks(&mut writer);
    assert_eq!(open(&writer).unwrap().config().moe.as_ref().unwrap().scale, 1.0);
    // A type that can't be read is named with the expert.
    let mut writer = mixtral("", |_| {});
    zeros(&mut writer, "blk.0.ffn_gate_exps.weight", &[4, 64, 32]);
    zeros(&mut writer, "blk.0.ffn_up_exps.weight", &[4, 64, 32]);
    writer.tensor_of_type("blk.0.ffn_down_exps.weight", 11, &[64, 32, 4], &[0; 64]);
    says(&refused(open(&writer)), &["experts.0.down_proj.weight is stored as Q3_K"]);
}

/// The last blocks of GLM-4-MoE's files predict further tokens, and are counted.
#[test]
fn blocks_that_predict_further_tokens_are_no_layers() {
    let model = synthetic(&config_with("glm4_moe", &json!({"num_hidden_layers": 3})));
    let mut writer = write::from_checkpoint(&model, DType::F32).unwrap();
    writer.u32("glm4moe.nextn_predict_layers", 1);
    zeros(&mut writer, "blk.2.nextn.eh_proj.weight", &[64, 128]);
    let opened = open(&writer).unwrap();
    let shorter = synthetic(&moe_config("glm4_moe"));
    assert_eq!(opened.config(), shorter.config());
    assert_eq!(opened.parameters(), shorter.parameters());
    let unused = opened.unused();
    assert!(unused.contains(&"blk.2.nextn.eh_proj.weight".to_owned()), "{unused:?}");
    assert!(unused.contains(&"model.layers.2.mlp.experts.up_proj.weight".to_owned()), "{unused:?}");
}
